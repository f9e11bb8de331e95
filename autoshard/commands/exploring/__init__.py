"""``autoshard explore``: questions and their answers on a page of this machine."""
