"""Makes the recurrent modules of a model compute packed rows, if they are proven."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from worker_proc.errors import UnsupportedModel
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.gated_norm import fuse_gated_norms
from worker_proc.modules.left_factors import pack_left_factors, pack_right_factors
from worker_proc.modules.packed_linear import can_pack
from worker_proc.modules.recurrent_proof import MAX_ERROR, Observed, find_error, observe
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.recurrent.layers import install, make_layer


@dataclass(frozen=True, slots=True)
class ProvenModule:
    """Observations of a recurrent module that agrees with its own forward."""

    observed: Observed
    gated_norms: dict[str, int] = field(default_factory=dict)
    """The gatings of replaced norms, by the names of the module's children."""


def install_recurrent(
    loaded: LoadedModel,
    library: NativeLibrary | None,
    known: Mapping[str, ProvenModule] | None = None,
) -> dict[str, ProvenModule]:
    """Install all recurrent modules of a model, before any of its weights are packed.

    Returns the observations of each module, by name. `known` is such a result of an earlier start;
    with it, nothing is compared. Raises UnsupportedModel if a module over packed rows differs from
    its own forward.
    """
    if loaded.dtype not in NATIVE_DTYPES:
        library = None
    proven: dict[str, ProvenModule] = {}
    for spec in loaded.recurrent:
        module = loaded.model.get_submodule(spec.module_name)
        before = None if known is None else known.get(spec.module_name)
        if before is None:
            error = find_error(module, spec, library)
            if not error <= MAX_ERROR:
                raise UnsupportedModel(
                    f"{loaded.model.config.model_type}: {spec.module_name}"
                    f" ({type(module).__name__}) over packed rows differs from its own forward"
                    f" (relative error {error:.3g})"
                )
            norms = {} if library is None else fuse_gated_norms(module, library)
            before = ProvenModule(observe(module, spec, loaded.dtype), norms)
        elif library is not None:
            fuse_gated_norms(module, library, before.gated_norms)
        proven[spec.module_name] = before
        layer = make_layer(module, spec, library)
        layer.is_rowwise |= before.observed.uses_functions
        layer.plain_products = before.observed.plain_products
        if can_pack(loaded.dtype, loaded.device, library):
            pack_left_factors(module, before.observed.left_factors, library)
            right, added = before.observed.right_factors, before.observed.added
            pack_right_factors(module, right, added, library)
        install(module, layer)
    return proven
