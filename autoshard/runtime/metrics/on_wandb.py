"""A run on Weights & Biases; without a key, or where the server cannot be reached, in files that can be sent later."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_FINISH_S = 60.0  # for what has not been uploaded when a run ends
_FLUSH, _FLUSH_S = "x_transaction_log_flush_interval", 1.0  # what a kill may take; 15 s if nothing is said


class OnWandb:
    """One W&B run, however often its training is continued."""

    name = "Weights & Biases"

    def __init__(
        self, *, labels: Mapping[str, str], run_id: str | None, folder: Path, files: Mapping[str, Path]
    ) -> None:
        self._labels, self._run_id = labels, run_id  # project, name, group; without an id an agent has given one
        self._folder, self._files = folder.resolve(), files
        self._run: Any = None
        self.next_step = 0

    def start(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Begin or continue the run, and attach its files."""
        import wandb
        from wandb.errors import Error

        self._folder.mkdir(parents=True, exist_ok=True)
        mode, notes = _mode(wandb)
        try:
            self._begin(wandb, config, mode)
        except Error as error:
            if mode == "offline":
                raise
            notes = [f"Weights & Biases: {_first_line(error)}"]
            wandb.teardown()  # otherwise its service holds that the run is under way
            self._begin(wandb, config, "offline")
        for name, path in self._files.items():
            artifact = wandb.Artifact(f"{name}-{self._run_id}", type=name)
            artifact.add_file(str(path), policy="immutable")
            self._run.log_artifact(artifact)
        if not self._run.offline:
            return [f"Weights & Biases: {self._run.url}"]
        lies = Path(self._run.settings.sync_dir)
        return [*notes, f"Weights & Biases: kept offline. To send it, type: wandb sync {lies}"]

    @property
    def config(self) -> Mapping[str, Any]:
        """What the run was asked, with what a controller has chosen."""
        return dict(self._run.config)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand on a step; one that W&B has already, and that is done again, is not sent again: it takes none back."""
        if step >= self.next_step:
            self._run.log(dict(values), step=step, commit=True)
            self.next_step = step + 1

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """Write the summary, and wait a minute for what has to be uploaded."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))

    def _begin(self, wandb: Any, config: Mapping[str, Any], mode: str) -> None:
        settings: dict[str, Any] = {"console": "off", "silent": True, "finish_timeout": _FINISH_S}
        if _FLUSH in wandb.Settings.model_fields:  # a name with an x may go
            settings[_FLUSH] = _FLUSH_S
        self._run = wandb.init(
            id=self._run_id,
            resume="allow",
            config=dict(config),
            dir=str(self._folder),
            mode=mode,
            settings=wandb.Settings(**settings),
            **self._labels,
        )
        self.next_step = self._run.starting_step


def _mode(wandb: Any) -> tuple[str, list[str]]:
    """Return how W&B is to run: as the user's settings say, but offline without a key, where it would ask for one."""
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib.wbauth import authenticate_session

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode != "online":
        return settings.mode, []
    try:
        found = authenticate_session(host=settings.base_url, source="autoshard", prompt=False, update_session=False)
    except AuthenticationError as error:
        return "offline", [f"Weights & Biases: {_first_line(error)}"]
    if found is None:
        return "offline", ["Weights & Biases: there is no key here. To get one, type: wandb login"]
    return "online", []


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
