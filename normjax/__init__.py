"""normjax: what normalization and residual connections do in a transformer decoder.

    import normjax

    normjax.verify(my_norm, my_jacobian, at=x).check()     a norm of your own against jax.jacfwd
    normjax.norm_jacobian("rmsnorm", h, eps=1e-6)          (d, d), closed form
    normjax.spectrum(f, x)                                 singular values of any function
    parts = normjax.Parts(model, params)                   a decoder taken apart
    parts.block(2).token_jacobians(h), parts.stack(1, 4)   one block, or a run of them
    normjax.TrainedRun(folder).parts(step)                 the same of a trained run
    normjax.tap("block 3", h), normjax.profile(loss, params, batch)    diagnostics of any model

The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_NAMES = {
    "normjax.norms": (
        "NORMS",
        "Law",
        "Norm",
        "NormLayer",
        "Parameter",
        "RMSNorm",
        "LayerNorm",
        "register_norm",
    ),
    "normjax.norm_functions": ("rms_norm", "layer_norm"),
    "normjax.equation": (
        *("MODEL_NORM", "SHARED_NORM", "Learned", "OnRows", "Started", "Sublayer"),
    ),
    "normjax.mixing": (
        *("LearnedWeights", "RowGates", "SoftmaxOverSources", "StateGates", "Streams", "Weights"),
    ),
    "normjax.norm_derivatives": ("NormDerivative", "diagonal"),
    "normjax.placement": ("Placement",),
    "normjax.placements": ("PLACEMENTS", "register_placement"),
    "normjax.decoder": ("Decoder",),
    "normjax.decoder_config": ("DecoderConfig",),
    "normjax.jacobians.closed_forms": (
        *("norm_jacobian", "norm_jvp", "norm_vjp", "null_directions", "placement_jacobian"),
    ),
    "normjax.jacobians.branch_jacobians": ("softmax_jacobian", "softmax_gauge"),
    "normjax.jacobians.verification": ("verify",),
    "normjax.jacobians.blocks": ("Parts",),
    "normjax.jacobians.views": (
        *("as_function", "token_jacobians", "pair_jacobian", "sequence_jacobian"),
    ),
    "normjax.jacobians.radial": ("radial_report", "radial_gains", "deflated_spectrum"),
    "normjax.spectra.spectrum": ("spectrum",),
    "normjax.spectra.krylov": ("top_singular_values",),
    "normjax.spectra.stochastic": ("spectral_density", "frobenius_norm"),
    "normjax.spectra.depth_products": ("depth_log_singular_values",),
    "normjax.spectra.norm_spectra": (*("rms_norm_singular_values", "layer_norm_singular_values"),),
    "normjax.theory.random_matrices": ("GaussianBlock",),
    "normjax.theory.matrix_products": ("ProductLaw",),
    "normjax.data.corpora": ("DataConfig", "Source", "register_corpus"),
    "normjax.data.tasks.table": ("register_task",),
    "normjax.data.tasks.task": ("Task",),
    "normjax.training.trained": ("TrainedRun", "run_folders"),
    "normjax.diagnostics.any_model": ("tap", "profile"),
    "normjax.diagnostics.log": ("read_diagnostics",),
    "normjax.diagnostics.definitions": ("DIAGNOSTICS",),
    "normjax.diagnostics.probe": ("Probe",),
    "normjax.errors": ("UserError",),
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    """Load a public name: reports and tables are made where there is no JAX to import."""
    if name not in _MODULE:
        raise AttributeError(f"module 'normjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
