"""Restores the run directory and the supervisor's socket in it after another program removed them.

Programs that clean up directories of temporary files remove what looks old. Running processes keep
their connections, but their successors need the directory.
"""

import logging

from protocol.transport.channel import RouterChannel
from scripts.supervisor.console import Console
from scripts.supervisor.host_agents import HostAgents
from scripts.supervisor.run_dirs import RunDir, RunDirBusyError

_CHECK_PERIOD_S = 1.0
_REPORT_PERIOD_S = 60.0
_NUM_SILENT_FAILURES = 3
"""Number of consecutive failures that are not reported. A replica's directory is within that of the
whole engine, whose supervisor restores it."""


class RunDirKeeper:
    """Checks once a second that the files exist."""

    def __init__(
        self,
        run_dir: RunDir,
        link: RouterChannel,
        agents: HostAgents | None,
        console: Console,
        *,
        makes_parents: bool,
    ) -> None:
        """With `makes_parents`, the directories above may be restored, too."""
        self._run_dir = run_dir
        self._link = link
        self._agents = agents
        self._console = console
        self._makes_parents = makes_parents
        self._check_at = self._report_at = 0.0
        self._num_failures = 0

    def check(self, now: float) -> str | None:
        """Restore removed files; return the reason if another engine has the directory now."""
        if now < self._check_at or self._run_dir.is_lost:
            return None
        self._check_at = now + _CHECK_PERIOD_S
        try:
            was_removed = self._run_dir.restore(makes_parents=self._makes_parents)
            was_removed = self._link.keep_listening() or was_removed
        except RunDirBusyError as error:
            return str(error)
        except (OSError, ValueError) as error:
            self._on_failure(error, now)
            return None
        self._num_failures = 0
        if was_removed:
            if self._agents is not None:
                self._agents.write_again()
            path = self._run_dir.path
            self._console.note(logging.WARNING, f"files were removed from {path}: it is restored")
        return None

    def _on_failure(self, error: Exception, now: float) -> None:
        self._num_failures += 1
        if self._num_failures > _NUM_SILENT_FAILURES and now >= self._report_at:
            self._report_at = now + _REPORT_PERIOD_S
            text = f"run_dir {self._run_dir.path} was removed and cannot be made again: {error}"
            self._console.note(logging.ERROR, f"{text}; no process can be replaced")
