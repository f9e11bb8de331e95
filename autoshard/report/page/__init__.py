"""Pages to look at: one self-contained HTML file each, of a plan, a sweep, a run or benchmarks."""
