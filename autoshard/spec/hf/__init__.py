"""The ``config.json`` of Hugging Face: the architectures that are known, how their fields are read and written."""
