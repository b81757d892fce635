"""A child process without a supervisor; the test sends the supervisor's commands."""

import argparse

from protocol.config.settings import configure
from protocol.lifecycle import Command, Role
from protocol.process.child_runtime import ChildProcess


class UnsupervisedChild(ChildProcess):
    """Returns the commands that the test puts into its inbox, and counts reports of `drained`."""

    def __init__(
        self,
        role: Role,
        run_dir: str,
        epoch: int,
        *,
        progress_fd: int | None = None,
        **settings: object,
    ) -> None:
        arguments = argparse.Namespace(
            parent_fd=None, epoch=epoch, rank=0, listen_fd=None, progress_fd=progress_fd
        )
        super().__init__(role, arguments, configure(model="null", run_dir=run_dir, **settings))
        self.inbox: list[Command] = []
        self.num_drained = 0

    def messages(self) -> list[Command]:
        messages, self.inbox = self.inbox, []
        return messages

    def drained(self) -> None:
        self.num_drained += 1
