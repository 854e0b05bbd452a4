"""Real detectors through a real Runner and mmdet's own tools/train.py."""
from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from demo import train_script
from helpers.logs import said_in
from helpers.paths import ROOT
from helpers.torch_features import needs_half
from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS
from mmengine.config import Config
from mmengine.runner import Runner
from stock import stock_on_cpu

from mmdet_nanfix.incidents import read_log
from mmdet_nanfix.report import main
from mmdet_nanfix.report.table import find_logs

BCCD = os.environ.get(
    'NANFIX_BCCD', os.path.join(ROOT, '..', 'shared', 'data', 'bccd'))


def dump(cfg, tmp_path):
    path = str(tmp_path / 'config.py')
    cfg.dump(path)
    return path


def launch(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, train_script(), *arguments], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict(os.environ, PYTHONUNBUFFERED='1'), **kwargs)


def test_the_demo_configs_differ_by_custom_imports_alone():
    folder = os.path.join(ROOT, 'configs', 'demo')
    stock, guarded = (Config.fromfile(os.path.join(folder, name)).to_dict()
                      for name in ('shapes_fp16_512.py',
                                   'shapes_fp16_512_nanfix.py'))
    assert guarded.pop('custom_imports') == dict(
        imports=['mmdet_nanfix'], allow_failed_imports=False)
    assert stock == guarded
    assert stock['optim_wrapper']['type'] == 'AmpOptimWrapper'
    assert stock['optim_wrapper']['loss_scale'] == 512.


def test_a_dumped_config_is_stripped_as_the_readme_says(tiny_config,
                                                        tmp_path):
    path = dump(tiny_config, tmp_path)
    cfg = Config.fromfile(path, import_custom_modules=False)
    cfg.pop('custom_imports')
    cfg.dump(path)
    code = ('import sys; sys.modules["mmdet_nanfix"] = None\n'
            'from mmengine.config import Config\n'
            f'print(Config.fromfile({path!r}).optim_wrapper.type)\n')
    done = subprocess.run([sys.executable, '-c', code], text=True,
                          capture_output=True, timeout=120)
    assert done.stdout.strip() == 'AmpOptimWrapper', done.stderr


@needs_half
def test_amp_flag_writes_the_per_head_log(tiny_config, tmp_path):
    # The weight overflows the box head's gradients at every scale from 16.
    box = tiny_config.model.roi_head.bbox_head
    box.loss_cls.loss_weight = box.loss_bbox.loss_weight = 3000.
    work = tmp_path / 'work'
    tiny_config.optim_wrapper = dict(type='OptimWrapper',
                                     optimizer=dict(type='SGD', lr=1e-4))
    process = launch(dump(tiny_config, tmp_path), '--amp')
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
    (log, ) = find_logs(work)
    records = list(read_log(log))
    assert records and records[0]['iter'] == 1
    for record in records:
        assert record['where']['phase'] == 'backward'
        assert record['where']['head'] == 'roi_head.bbox_head'
        assert record['where']['op'] == 'linear'
        assert '/bbox_heads/convfc_bbox_head.py:' in (
            record['where']['source'])
        assert record['replay'] is None
        heads = record['heads']
        assert heads['rpn_head']['bad_grads'] == []
        assert set(heads['rpn_head']['losses']) == {'loss_rpn_cls',
                                                    'loss_rpn_bbox'}
        assert set(heads['roi_head.bbox_head']['losses']) == {'loss_cls',
                                                              'loss_bbox'}
    lines = said_in(work)
    assert sum('guarding float16 (emulated)' in line for line in lines) == 1
    assert sum('step skipped' in line or 'step made again' in line
               for line in lines) == len(records)
    assert lines[-1].startswith('1 of 4 optimizer steps were skipped, 1 '
                                'more were made again')
    assert len(records) == 2
    assert main([str(work)]) == 1


def test_a_bad_forward_names_the_head_and_the_loss(tiny_config, tmp_path):
    # An encoded target of 1e38 and a weight on it: a loss of inf.
    box = tiny_config.model.roi_head.bbox_head
    box.bbox_coder.target_stds = [1e-37, 1e-37, 1e-37, 1e-37]
    tiny_config.model.roi_head.bbox_head.loss_bbox.loss_weight = 1e6
    Runner.from_cfg(tiny_config).train()
    (log, ) = find_logs(tmp_path)
    record = next(read_log(log))
    assert record['where']['phase'] == 'loss'
    assert record['where']['head'] == 'roi_head.bbox_head'
    assert record['heads']['roi_head.bbox_head']['bad_losses'] == [
        'loss_bbox']
    assert record['heads']['rpn_head']['bad_losses'] == []
    assert record['loss_scale'] == dict(before=256., after=256.)
    # The weight times a sum that still fits fp32.
    assert record['where']['op'] == 'mul'
    assert '/losses/' in record['where']['source']


@TRANSFORMS.register_module()
class SpoilsABox(BaseTransform):
    """An augmentation that divides by zero, for one of the images."""

    def transform(self, results):
        if results['img_id'] == 5:
            results['gt_bboxes'].tensor[1, 2] = math.nan
        return results


def test_a_bad_box_in_the_data_is_named(tiny_config, tmp_path):
    """By the file of its image and its index, in a real run."""
    pipeline = tiny_config.train_dataloader.dataset.pipeline
    pipeline.insert(len(pipeline) - 1, dict(type='SpoilsABox'))
    Runner.from_cfg(tiny_config).train()
    (log, ) = find_logs(tmp_path)
    (record, ) = read_log(log)
    (image, ) = record['images']
    assert os.path.basename(image['img_path']) == '005.png'
    assert image['annotation']['index'] == 1
    assert image['annotation']['what'] == 'box is not finite'
    assert record['where']['phase'] == 'input'


def test_early_stopping_ends_with_the_table_too(tiny_config, tmp_path):
    from mmengine.hooks import Hook

    class Stop(Hook):

        def after_train_iter(self, runner, *args, **kwargs):
            runner.train_loop.stop_training = True

    tiny_config.train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=3,
                                 val_interval=10)
    tiny_config.model.roi_head.bbox_head.loss_cls.loss_weight = 1e39
    runner = Runner.from_cfg(tiny_config)
    runner.register_hook(Stop())
    runner.train()
    lines = said_in(tmp_path / 'work')
    assert sum('optimizer steps were skipped' in line for line in lines) == 1


def losses_and_weights(cfg):
    runner = Runner.from_cfg(cfg)
    runner.train()
    (path, ) = (os.path.join(folder, 'scalars.json')
                for folder, _, files in os.walk(runner.log_dir)
                if 'scalars.json' in files)
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    keys = ('loss', 'loss_rpn_cls', 'loss_rpn_bbox', 'loss_cls', 'loss_bbox',
            'grad_norm')
    return ([[row[key] for key in keys] for row in rows if 'loss' in row],
            {name: value.clone() for name, value
             in runner.model.state_dict().items()})


def test_a_healthy_run_equals_stocks_bit_for_bit(tiny_config, tmp_path):
    # The scale grows once on the way, by the same rule in both.
    tiny_config.optim_wrapper.loss_scale = dict(init_scale=64.,
                                                growth_interval=2)
    tiny_config.optim_wrapper.optimizer.lr = .002
    runs = []
    for name in ('stock', 'guarded'):
        cfg = copy.deepcopy(tiny_config)
        cfg.work_dir = str(tmp_path / name)
        cfg.visualizer.name = cfg.work_dir
        if name == 'stock':
            with stock_on_cpu():
                runs.append(losses_and_weights(cfg))
        else:
            cfg.optim_wrapper.nanfix = dict(fp32=None)
            runs.append(losses_and_weights(cfg))
    assert find_logs(tmp_path / 'stock') == []
    (log, ) = find_logs(tmp_path / 'guarded')
    assert list(read_log(log)) == []
    (stock_losses, stock), (our_losses, ours) = runs
    assert len(stock_losses) == 4
    assert stock_losses == our_losses
    assert all(math.isfinite(value) for row in our_losses for value in row)
    assert stock.keys() == ours.keys()
    assert all(torch.equal(stock[name], ours[name]) for name in stock)


@needs_half
def test_a_run_killed_in_an_incident_leaves_a_readable_log(
        tiny_config, tmp_path, capsys):
    tiny_config.model.roi_head.bbox_head.loss_cls.loss_weight = 1e39
    work = tmp_path / 'work'
    process = launch(dump(tiny_config, tmp_path))
    for line in process.stdout:
        if 'step skipped (2 in a row' in line:
            break
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGKILL
    (log, ) = find_logs(work)
    records = list(read_log(log))
    assert [record['iter'] for record in records][:2] == [1, 2]
    assert records[0]['heads']['roi_head.bbox_head']['losses'][
        'loss_cls'] == 'inf'
    with open(log, 'a') as file:
        file.write('{"schema": 1, "iter"')
    assert main([str(work)]) == 1
    assert '> roi_head.bbox_head' in capsys.readouterr().out


def test_an_unwritable_log_never_stops_training(tiny_config, tmp_path):
    tiny_config.model.roi_head.bbox_head.loss_cls.loss_weight = 1e39
    runner = Runner.from_cfg(tiny_config)
    # The place of the folder is taken by a file.
    with open(os.path.join(runner.log_dir, 'nanfix'), 'w'):
        pass
    runner.train()
    lines = said_in(tmp_path / 'work')
    assert sum('cannot write the incident log' in line for line in lines) == 1
    assert sum('step skipped' in line for line in lines) == 4


@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.path.isdir(BCCD), reason=f'{BCCD} is not there')
def test_any_coco_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('COCO_FOLDER', BCCD)
    cfg = Config.fromfile(
        os.path.join(ROOT, 'configs', 'faster-rcnn_r18_fpn_coco-folder.py'))
    assert cfg.train_dataloader.dataset.metainfo.classes == (
        'RBC', 'WBC', 'Platelets')
    cfg.work_dir = str(tmp_path)
    cfg.visualizer.name = str(tmp_path)
    cfg.default_hooks.logger.interval = 1
    # Smaller than the config trains, for the time of the suite.
    for transform in (*cfg.train_pipeline, *cfg.test_pipeline):
        if transform.type == 'Resize':
            transform.scale = (160, 120)
    cfg.train_dataloader.dataset.pipeline = cfg.train_pipeline
    cfg.val_dataloader.dataset.pipeline = cfg.test_pipeline
    runner = Runner.from_cfg(cfg)
    runner.train()
    (path, ) = tmp_path.glob('*/vis_data/scalars.json')
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [row['loss'] for row in rows if 'loss' in row]
    scores = [row['coco/bbox_mAP'] for row in rows if 'coco/bbox_mAP' in row]
    assert len(losses) == 40 and losses[-1] < .8 * losses[0]
    assert scores and all(0 <= score <= 1 for score in scores)
    (log, ) = find_logs(tmp_path)
    assert any('guarding float16 (emulated)' in line
               for line in said_in(tmp_path))
