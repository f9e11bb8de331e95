"""The torch engine: one process per rank, joined by ``torch.distributed``. Only this folder imports torch."""
