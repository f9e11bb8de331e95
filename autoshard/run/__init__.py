"""What both towers know of a run, without torch: its folder, its reports, where each rank stands, what an engine is."""
