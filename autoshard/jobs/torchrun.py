"""A job that somebody starts by hand on every node, with torchrun."""

from autoshard.jobs.job import NODE, Files, Job, common_texts
from autoshard.jobs.shell import meeting_of, node_text


def torchrun_files(job: Job) -> Files:
    """Return the files of a job without a scheduler."""
    return Files(texts={**common_texts(job), NODE: node_text(job, meeting_of(job, "torchrun"))}, submitter=None)
