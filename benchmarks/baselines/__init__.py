"""What people use to choose a layout without autoshard, as files for ``autoshard validate``."""
