"""Report incidents: log file, console, scalars, the table at the end."""
from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Sequence

import torch
from mmengine import dist
from mmengine.logging import MMLogger, print_log
from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from mmengine.visualization import Visualizer
from torch import nn

from ...guard.checks import bad_tensors
from ...guard.rules import LossScale, StopRule
from ...incidents import Incident, IncidentLog, IncidentText, Summary
from ...torch_support import HAS_EAGER_STANCE

__all__ = ['IncidentReporter', 'say', 'warn']


def say(message: str, level: int = logging.INFO) -> None:
    """One line to MMEngine's current logger."""
    print_log(f'nanfix: {message}', logger='current', level=level)


def warn(message: str) -> None:
    """One line to MMEngine's current logger, as a warning."""
    say(message, logging.WARNING)


def _log_folder() -> str | None:
    """``<work_dir>/<timestamp>``, where the running Runner logs to."""
    log_file = getattr(MMLogger.get_current_instance(), '_log_file', None)
    return os.path.dirname(os.path.abspath(log_file)) if log_file else None


class IncidentReporter:
    """Reports incidents wherever the host shows what happens.

    Args:
        stop: The stop rule, for its counters.

    Attributes:
        folder: The runner's own log folder; None for that of the current
            logger, which two runs of one name share.
        log: The log file; None before :meth:`open`.
        summary: The incidents so far, counted.
    """

    def __init__(self, stop: StopRule) -> None:
        self.folder: str | None = None
        self.log: IncidentLog | None = None
        self.summary = Summary()
        self._stop = stop
        self._drawing = True
        self._closed = False

    def open(self) -> None:
        """Begin the log file."""
        folder = self.folder or _log_folder()
        self.log = IncidentLog(os.path.join(folder, 'nanfix') if folder
                               else None, dist.get_rank(), warn)

    def announce(self, precision: str, fp32: str | None, scale: LossScale,
                 exempt: Sequence[str], has_compiled_parts: bool) -> None:
        """One line with the settings in force, and one for each exception.

        Args:
            precision: Of the training.
            fp32: Which regions run in fp32, or None.
            scale: The loss scale.
            exempt: Names of buffers that are not watched.
            has_compiled_parts: Whether ``torch.compile`` was called.
        """
        if scale.note:
            say(scale.note)
        say(f'guarding {precision} training'
            f'{f", fp32 in {fp32}" if fp32 else ""}; {scale}; stop '
            f'after {self._stop.max_consecutive} skipped steps in a row; '
            f'incidents go to {self.path or "the console only"}')
        if has_compiled_parts and not HAS_EAGER_STANCE:
            say(f'torch {torch.__version__} cannot run compiled parts of a '
                'model as they are written (2.6 can): where something begins '
                'in them, a line of the compiled code is named; in emulated '
                'half before 2.4 they keep the dtype that they began with')
        if exempt:
            say(f'{len(exempt)} buffers hold non-finite numbers from the '
                f'start and are not watched: {", ".join(exempt[:3])}'
                + (', ...' if len(exempt) > 3 else ''))

    @property
    def path(self) -> str | None:
        """The log file, where there is one that can be written."""
        log = self.log
        return log.path if log is not None and log.writable else None

    def report(self, incident: Incident) -> None:
        """One line on the console, one in the file, two scalars."""
        self.summary.add(incident)
        if self.log is not None:
            self.log.write(incident)
        warn(IncidentText(incident.to_dict()).line)
        self.add_scalar('incidents', self._stop.total + self._stop.saved,
                  incident.iter)
        self.add_scalar('skipped', self._stop.total, incident.iter)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """One scalar to the visualizer's backends, where there is one."""
        if not (self._drawing and Visualizer._instance_dict
                and dist.is_main_process()):
            return
        try:
            Visualizer.get_current_instance().add_scalar(
                f'nanfix/{name}', value, step=step)
        except Exception as error:
            # Any backend, any failure: a full disk, a lost server.
            self._drawing = False
            warn('the visualizer takes no scalars '
                 f'({type(error).__name__}: {error}); training goes on')

    def close(self, scale: float) -> None:
        """Print the table at the end, once.

        Args:
            scale: The loss scale now.
        """
        if self._closed or not self.summary.rows:
            return
        self._closed = True
        path = self.path
        where = f'details: python -m mmdet_nanfix.report ' \
            f'{os.path.dirname(os.path.dirname(path))}' if path else (
                'no log was kept')
        saved = f', {self._stop.saved} more were made again' if (
            self._stop.saved) else ''
        say(f'{self._stop.total} of {self._stop.steps} optimizer steps '
            f'were skipped{saved}, loss scale now {scale:g}; '
            f'{where}\n{self.summary.text()}')

    def stop_message(self, reason: str, saved: str) -> str:
        """Why training was stopped, what was kept, and what to do."""
        return (f'Training was stopped: {reason}. {saved} '
                f'Which head went bad is in {self.path or "the lines above"};'
                ' mend the cause, or train on with '
                'optim_wrapper.nanfix.max_consecutive=None.')

    def save_weights(self, model: nn.Module, epoch: int | None,
                     iteration: int, optimizer: Any) -> str:
        """Save what no skipped step has touched; say where.

        Called on all ranks: to gather a sharded model takes them all.

        Args:
            model: As its ``state_dict`` is to be read.
            epoch: The current one, from 1, or None.
            iteration: The current one, from 1.
            optimizer: Its state.
        """
        if self.log is None or self.log.path is None:
            return 'No weights were saved, since no log folder is known.'
        path = os.path.join(os.path.dirname(self.log.path),
                            f'stopped_iter_{iteration}.pth')
        state = model.state_dict()
        failed: list[str | None] = [None]
        if dist.is_main_process():
            failed = [_save_whole({
                # As MMEngine counts: steps and epochs that are done.
                'meta': {'iter': iteration, 'epoch': (epoch or 1) - 1},
                'state_dict': weights_to_cpu(state),
                'optimizer': optimizer,
            }, path)]
        # A process that ends before it is written takes the others with it.
        dist.broadcast_object_list(failed)
        dist.barrier()
        if failed[0] is not None:
            return f'The weights could not be saved ({failed[0]}).'
        named = {**dict(model.named_parameters()),
                 **dict(model.named_buffers())}
        bad = [list(named)[i] for i in bad_tensors(list(named.values()))]
        note = f' ({len(bad)} tensors in it are not finite: {bad[0]}, ...)' \
            if bad else ''
        return ('The weights, untouched by them, are in '
                f'{path}{note}, for load_from.')


def _save_whole(checkpoint: dict[str, Any], path: str) -> str | None:
    """Save a checkpoint whole or not at all; why not, in words, or None."""
    half_written = f'{path}.tmp'
    try:
        save_checkpoint(checkpoint, half_written)
        os.replace(half_written, path)
    except (OSError, RuntimeError) as error:
        # torch raises the other where a disk is full.
        with contextlib.suppress(OSError):
            os.remove(half_written)
        return ' '.join(str(error).split())
    return None
