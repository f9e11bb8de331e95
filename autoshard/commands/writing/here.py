"""Questions about this machine are answered with what runs have taught about it."""

from dataclasses import replace

from autoshard.calibration.learned import constants_file
from autoshard.runtime.machine import user_folder
from autoshard.spec.cluster import LOCAL
from autoshard.spec.recipe import QuestionOptions


def on_this_machine(question: QuestionOptions) -> QuestionOptions:
    """Return a question with the constants of this machine, if it is about it and states none."""
    learned = constants_file(user_folder()) if question.cluster == LOCAL and not question.calibration else None
    return replace(question, calibration=str(learned)) if learned else question
