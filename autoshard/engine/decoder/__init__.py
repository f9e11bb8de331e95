"""The decoder as a plain ``nn.Module``: the graph of ``graph/decoder.py`` with one submodule per operation."""
