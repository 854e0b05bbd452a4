"""A detector whose box head overflows, trained without and with the guard.

Both runs go through MMDetection's own ``tools/train.py`` in emulated half
precision, with the same seed and the same fixed ``loss_scale=512.``; the
configs differ by ``custom_imports`` alone. The run without the guard is the
stock class with its device check bypassed (see ``lib/stock.py``), since it
refuses a CPU.
"""
from __future__ import annotations

import argparse
import glob
import json
import math
import os
import re
import subprocess
import sys
import time
from typing import Any, Sequence

import torch
from rich.console import Console
from rich.table import Table

from mmdet_nanfix.incidents import read_log
from mmdet_nanfix.report.table import find_logs

sys.path.insert(0, os.path.join(os.path.dirname(
    os.path.abspath(__file__)), 'lib'))

from shapes import write_shapes

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join('work_dirs', 'demo')
STARTED = time.time()
_STEP = re.compile(r'Epoch\(train\)\s+\[(\d+)\]\[\s*(\d+)/(\d+)\].*?'
                   r' loss: (\S+)')


def say(text: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f'[demo {time.time() - STARTED:4.0f} s] {text}', flush=True)


def train_script() -> str:
    """MMDetection's own ``tools/train.py``, as its wheel carries it."""
    import mmdet
    package = os.path.dirname(mmdet.__file__)
    for folder in (os.path.join(package, '.mim'), os.path.dirname(package)):
        script = os.path.join(folder, 'tools', 'train.py')
        if os.path.isfile(script):
            return script
    sys.exit(f'demo: {package} carries no tools/train.py; install mmdet from '
             'a wheel or from its repository')


def train(name: str, command: Sequence[str]) -> None:
    """Run one training and show a line of progress every few steps."""
    path = os.path.join(WORK, f'{name}.log')
    env = dict(os.environ, PYTHONUNBUFFERED='1')
    with open(path, 'w') as log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=env, text=True, errors='replace') as process:
        for line in process.stdout or ():
            log.write(line)
            step = _STEP.search(line)
            if step:
                epoch, iteration, count, loss = step.groups()
                say(f'{name}: epoch {epoch}, step {iteration} of {count}, '
                    f'loss {loss}')
            elif 'nanfix: ' in line and 'loss scale' in line:
                say(f'{name}: {line.partition("nanfix: ")[2].strip()}')
    if process.returncode != 0:
        sys.exit(f'demo: the {name} run failed with exit status '
                 f'{process.returncode}; its output is in {path}')


def newest(name: str, pattern: str) -> str:
    """Latest file of a run."""
    found = glob.glob(os.path.join(WORK, name, pattern), recursive=True)
    return max(found, key=os.path.getmtime)


def batch_norm_state(weights: dict[str, torch.Tensor]) -> str:
    """What the running statistics have seen, and whether they are finite."""
    running = [value for key, value in weights.items() if 'running_' in key]
    bad = sum(not torch.isfinite(value).all() for value in running)
    seen = max(int(value) for key, value in weights.items()
               if key.endswith('num_batches_tracked'))
    state = f'{bad} of {len(running)} not finite' if bad else 'finite'
    return f'{state}, fed by {seen} batches'


def read_run(name: str) -> dict[str, Any]:
    """What a run left behind: checkpoint, scalars, output."""
    # Our own checkpoint of a minute ago; it holds MMEngine objects.
    checkpoint = torch.load(newest(name, 'epoch_*.pth'), 'cpu',
                            weights_only=False)
    with open(newest(name, '*/vis_data/scalars.json')) as file:
        scalars = [json.loads(line) for line in file]
    steps = [row for row in scalars if 'loss' in row]
    metrics = next(row for row in scalars if 'coco/bbox_mAP' in row)
    scaler = checkpoint['optimizer']['loss_scaler']
    momentum = checkpoint['optimizer']['state']
    return dict(
        scale=scaler['scale'],
        lost=scaler.get('nanfix_total'),
        steps=checkpoint['meta']['iter'],
        moved=bool(momentum),
        first_loss=steps[0]['loss'],
        last_loss=steps[-1]['loss'],
        grad_norm=steps[-1].get('grad_norm', math.nan),
        batch_norm=batch_norm_state(checkpoint['state_dict']),
        mAP=metrics['coco/bbox_mAP'],
        mAP_50=metrics['coco/bbox_mAP_50'])


def stock_steps_lost(steps: int) -> int:
    """Steps that the stock run did not take, as its launcher counted."""
    with open(os.path.join(WORK, 'stock.log')) as file:
        taken = re.search(r'optimizer stepped (\d+) times', file.read())
    return steps - int(taken.group(1)) if taken else steps


def side_by_side(stock: dict[str, Any], guarded: dict[str, Any]) -> Table:
    """Both runs in one table."""
    table = Table('', 'stock, loss_scale=512.', 'with mmdet_nanfix',
                  title='The same config, seed and data; emulated half '
                  'precision on a CPU', title_justify='left')
    rows: list[Any] = [
        ('optimizer steps lost',
         *(f'{run["lost"]} of {run["steps"]}' for run in (stock, guarded))),
        ('loss scale at the end',
         *(f'{run["scale"]:g}' for run in (stock, guarded))),
        ('weights', *('trained' if run['moved'] else 'as initialised'
                      for run in (stock, guarded))),
        ('BatchNorm statistics',
         *(run['batch_norm'] for run in (stock, guarded))),
        ('loss, first and last',
         *(f'{run["first_loss"]:.1f}, {run["last_loss"]:.1f}'
           for run in (stock, guarded))),
        ('grad_norm in the last line',
         *(f'{run["grad_norm"]:.1f}' for run in (stock, guarded))),
        ('evaluation: mAP, mAP at 0.5',
         *(f'{run["mAP"]:.3f}, {run["mAP_50"]:.3f}'
           for run in (stock, guarded))),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def check(stock: dict[str, Any], guarded: dict[str, Any],
          incidents: Sequence[dict[str, Any]]) -> str | None:
    """Why the demo did not show what it is for, or None."""
    if stock['lost'] != stock['steps'] or stock['moved']:
        return 'the stock run took steps: nothing overflowed at 512'
    if not 0 < guarded['lost'] < guarded['steps'] or (
            guarded['scale'] >= 128):
        return 'the guarded run did not settle below a scale of 128'
    if not math.isfinite(guarded['last_loss']):
        return 'the loss of the guarded run is not finite'
    if not all(incident['where']['head'] == 'roi_head.bbox_head'
               for incident in incidents):
        return 'the log blames another head than roi_head.bbox_head'
    return None


def main() -> None:
    """Generate, train twice, compare."""
    argparse.ArgumentParser(description=__doc__.split('\n')[0]).parse_args()
    os.chdir(ROOT)
    os.makedirs(WORK, exist_ok=True)
    say('drawing the training images')
    write_shapes(os.path.join(WORK, 'shapes'))
    script = train_script()
    configs = os.path.join('configs', 'demo', 'shapes_fp16_512')
    say('training without the guard: the stock AmpOptimWrapper at a fixed '
        'scale of 512, its device check bypassed (about a minute)')
    train('stock', [sys.executable, os.path.join('bench', 'lib', 'stock.py'),
                    script, f'{configs}.py', '--work-dir',
                    os.path.join(WORK, 'stock')])
    say('training with the guard: the same, and custom_imports (about a '
        'minute)')
    train('guarded', [sys.executable, script, f'{configs}_nanfix.py',
                      '--work-dir', os.path.join(WORK, 'guarded')])
    stock, guarded = read_run('stock'), read_run('guarded')
    stock['lost'] = stock_steps_lost(stock['steps'])
    log = find_logs(os.path.join(WORK, 'guarded'))[-1]
    incidents = list(read_log(log))
    console = Console()
    console.print()
    console.print(side_by_side(stock, guarded))
    console.print('\nThe per-head log of the guarded run:')
    subprocess.run([sys.executable, '-m', 'mmdet_nanfix.report',
                    os.path.dirname(os.path.dirname(log))], check=False)
    console.print(
        f'\nThe box head overflows half precision at 512. The guarded run '
        f'lost {guarded["lost"]} of {guarded["steps"]} steps finding that '
        'out and trains at '
        f'{guarded["scale"]:g}. Its log: {log}', markup=False)
    failure = check(stock, guarded, incidents)
    if failure:
        sys.exit(f'demo: {failure}')
    say('done')


if __name__ == '__main__':
    main()
