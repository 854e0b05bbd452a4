from __future__ import annotations

import pytest

from mmdet_nanfix.diagnosis.cause.remedy import select_remedy
from mmdet_nanfix.diagnosis.findings import Counterfactual, Findings
from mmdet_nanfix.guard import Remedy
from mmdet_nanfix.incidents import Cause


def cause(code):
    return Cause(code, [], '')


@pytest.mark.parametrize('code, found, wanted', [
    ('NF101', dict(fits=64.), Remedy('retried', 64.)),
    ('NF101', dict(), None),
    ('NF102', dict(part='rpn_head', proven={'part in fp32'}),
     Remedy('rescued_fp32_head', None, ('rpn_head', ))),
    ('NF102', dict(part='rpn_head', fits=8., proven={'part in fp32'}),
     Remedy('rescued_fp32_head', 8., ('rpn_head', ))),
    # The loss was finite, but something after it was not.
    ('NF102', dict(part='rpn_head'), None),
    ('NF103', dict(mode='losses', proven={'losses in fp32'}),
     Remedy('rescued_fp32_head', None, ('losses', ))),
    ('NF108', dict(fits=64.), None), ('NF104', dict(fits=64.), None),
    ('NF105', dict(part='backbone', proven={'part in fp32'}), None),
])
def test_the_remedy_is_what_the_evidence_is_for(code, found, wanted):
    found = {**found, 'proven': set(map(
        Counterfactual, found.get('proven', ())))}
    findings = Findings(norm=1., **found)
    assert select_remedy(cause(code), findings, lambda norm: True) == wanted
    # Absurd, or nothing to compare with.
    assert select_remedy(cause(code), findings, lambda norm: False) is None
    assert select_remedy(cause(code), findings, lambda norm: None) is None
    assert select_remedy(None, findings, lambda norm: True) is None
    assert select_remedy(cause(code), Findings(**found),
                         lambda norm: True) is None
