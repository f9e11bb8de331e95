"""The torch engine: one process per rank, joined by ``torch.distributed``. Only here and in the decoder is torch."""
