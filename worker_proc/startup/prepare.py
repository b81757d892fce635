"""Loads a checkpoint, and replaces, rounds, fuses and packs its modules."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from torch import nn

from protocol.config import EngineConfig, Quantization, WorkerConfig
from protocol.process.model_files import read_model_files
from worker_proc.adapters.sites import MatrixPart, Sites
from worker_proc.adapters.store import AdapterStore
from worker_proc.cuda.device import prepare_device, resolve_device, uses_triton
from worker_proc.decoder.stack import NativeExecutor
from worker_proc.errors import UnsupportedModel
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.errors import GrammarError
from worker_proc.grammar.vocabulary import Vocabulary
from worker_proc.loading.checkpoint_identity import checkpoint_identity
from worker_proc.loading.heap import return_freed_memory
from worker_proc.loading.layer_executor import LayerExecutor
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.loader import load_checked
from worker_proc.loading.mapped_pages import release_mapped_pages
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.prepared import PreparedModel
from worker_proc.loading.proofs import find_proofs, with_proof
from worker_proc.loading.start_cache import StartCache
from worker_proc.modules.adapted_modules import adapt_modules, find_sites
from worker_proc.modules.coded_weights import dequantize_weights, without_kernels
from worker_proc.modules.compressed import install_compressed
from worker_proc.modules.experts.sized import pack_sized_experts
from worker_proc.modules.fusing import fuse_modules
from worker_proc.modules.grouped_linear import pack_grouped_linears
from worker_proc.modules.hyper_connections import install_hyper_connections
from worker_proc.modules.latent import install_latent
from worker_proc.modules.own_attention.install import install_own_attention
from worker_proc.modules.own_attention.observation import OwnLayer
from worker_proc.modules.own_matrices import pack_own_matrices, pack_own_stacks
from worker_proc.modules.packed_linear import can_pack, pack_linears
from worker_proc.modules.recurrent import ProvenModule, install_recurrent
from worker_proc.modules.rounding_refusals import check_experts, check_values
from worker_proc.modules.score_terms import pack_distance_products, prove_score_terms
from worker_proc.modules.weight_formats import PLAIN, Formats, formats_of
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary, load_library
from worker_proc.native.packed_weights import Format
from worker_proc.parallel.division.sharding import shard
from worker_proc.parallel.stage import places
from worker_proc.parallel.stages import connect_stage
from worker_proc.recurrent.rowwise import compute_activations_rowwise, compute_rowwise
from worker_proc.runner import ReportProgress
from worker_proc.startup.checks import check_models
from worker_proc.startup.required_kernels import check_kernel_device, load_required_kernels

T = TypeVar("T")

_log = logging.getLogger("troika.worker")


def prepare_model(
    config: EngineConfig, progress: ReportProgress, *, keeps_proofs: bool = False, rank: int = 0
) -> PreparedModel:
    """Load the configured checkpoints, and round, fuse and pack their modules as configured.

    Each of several ranks keeps its part of the matrices, and each of several stages its layers. The
    rank that answers has the whole draft model.
    """
    device = resolve_device(config.model.device)
    quantization = config.model.quantization
    kept = find_proofs(config, rank) if keeps_proofs and device.type == "cpu" else None
    prepare_device(device, rank)
    checkpoint = checkpoint_identity(config.model.model)  # before reading: files may change
    files = read_model_files(config.model.model)
    stage, share = places(rank, config.parallel)
    has_draft = rank == config.parallel.answering_rank
    checked, checked_draft, library, parts = check_models(
        config, device, kept, progress, stage, has_draft=has_draft
    )
    # No GPU holds the whole of a divided model.
    tokenizer = config.model.tokenizer or config.model.model
    loaded = load_checked(
        checked if share.num_ranks == 1 else checked.on_host(), progress, tokenizer
    )
    passages = None if parts is None else connect_stage(loaded, parts, stage)
    shared: dict[str, MatrixPart] = {}
    if share.num_ranks > 1:
        loaded, shared = shard(loaded, share, device)
    draft = None if checked_draft is None else load_checked(checked_draft, progress)
    if device.type == "cpu":
        library = _library_for((loaded, draft), progress)
    proofs = None if kept is None else kept.with_kernels(library)
    replace = partial(_replace_mixers, max_model_len=config.model.max_model_len)
    loaded = replace(loaded, library, proofs, progress)
    if draft is not None:
        draft = replace(draft, library, proofs, progress, suffix="_draft")
    _compute_gates_rowwise(loaded, draft)
    _pack_head(loaded, library)
    others = None if parts is None else parts.others(stage)
    sites = find_sites(loaded, shared, others) if config.lora.enable_lora else None
    if quantization is not None and library is not None:
        check_values(loaded, quantization, partial(progress, "check_weights"))
    formats = formats_of(quantization, is_quantized=loaded.codes is not None)
    _pack(loaded, library, proofs, progress, role="fused", formats=formats, rounded=quantization)
    if draft is not None:
        _pack(draft, library, proofs, progress, role="fused_draft")  # drafts are not rounded
    if library is not None:
        for one in filter(None, (loaded, draft)):
            compute_activations_rowwise(one.model)  # no kernel computes the remaining ones
    return_freed_memory()
    for directory in filter(None, (config.model.model, config.model.speculative_model)):
        release_mapped_pages(directory)
    vocabulary = Vocabulary(list(loaded.eos_token_ids), tokenizer)
    executor = _make_executor(loaded, draft, library, config.worker)
    grammars = _load_grammars(vocabulary, loaded.kind)
    adapters = None if sites is None else _make_store(loaded, library, sites, config)
    return PreparedModel(
        loaded, library, grammars, executor, proofs, draft, adapters, checkpoint, files, passages
    )


def _pack(
    loaded: LoadedModel,
    library: NativeLibrary | None,
    proofs: StartCache | None,
    progress: ReportProgress,
    *,
    role: str,
    formats: Formats = PLAIN,
    rounded: Quantization | None = None,
) -> None:
    """Fuse and pack a model's modules; `role` names its proofs, `rounded` its quantization."""
    if can_pack(loaded.dtype, loaded.device, library):
        progress("pack_weights", 0, 1)
        if library is not None:
            on_tried = partial(progress, "fuse_modules")
            _fuse(loaded, library, proofs, role, formats.layers, on_tried=on_tried)
            if rounded is not None and formats.layers is not PLAIN.layers:
                check_experts(loaded, rounded)
        pack_sized_experts(loaded.model, library)
        pack_linears(loaded.model, library, partial(progress, "pack_weights"), formats)
    _finish_codes(loaded)


def _make_store(
    loaded: LoadedModel, library: NativeLibrary | None, sites: Sites, config: EngineConfig
) -> AdapterStore:
    """Make the modules at the sites add the products of adapters."""
    assert library is not None  # enable_lora needs it
    lora = config.lora
    store = AdapterStore(
        library, loaded.dtype, sites, max_rank=lora.max_lora_rank, num_kept=lora.num_kept
    )
    adapt_modules(loaded.model, sites, store.rows)
    return store


def _library_for(
    models: Iterable[LoadedModel | None], progress: ReportProgress
) -> NativeLibrary | None:
    """Return the kernels if there are any; they are compiled now if weights are coded.

    Coded weights are dequantized if there are no kernels, or none for their dtype.
    """
    library = load_library()
    for one in filter(None, models):
        if one.codes is None:
            continue
        reason = ""
        if library is None:
            progress("compile_kernels", 0, 0)
            try:
                check_kernel_device("the checkpoint's format", one.device)
                library = load_required_kernels("the checkpoint's format")
            except UnsupportedModel as error:
                reason = str(error)
        if one.dtype not in NATIVE_DTYPES:
            reason = f"no kernel computes in {str(one.dtype).removeprefix('torch.')}"
        others = without_kernels(one.model)
        dequantize_weights(others, "it is not that of a linear layer, an embedding or experts")
        if reason:
            dequantize_weights(one.model.modules(), reason)
    return library


def _finish_codes(loaded: LoadedModel) -> None:
    """Dequantize weights that no kernel has taken, and log how all of them are stored."""
    if loaded.codes is None:
        return
    dequantize_weights(loaded.model.modules(), "no kernel computes its module")
    for line in loaded.codes.lines(loaded.dtype):
        _log.info("%s", line)


def _pack_head(loaded: LoadedModel, library: NativeLibrary | None) -> None:
    """Pack the head after pooling, which computes in float32 regardless of the model's dtype."""
    if loaded.head is not None and loaded.device.type == "cpu":
        for module in loaded.head.modules:
            pack_linears(module, library, lambda done, total: None)


def _replace_mixers(
    loaded: LoadedModel,
    library: NativeLibrary | None,
    proofs: StartCache | None,
    progress: ReportProgress,
    *,
    max_model_len: int | None,
    suffix: str = "",
) -> LoadedModel:
    """Replace modules that combine the rows of a text, and store the proofs.

    These are modules with score terms or recurrent states, and attention that does more than call a
    registered function; see docs/attention.md. `suffix` ends the names of the proofs.
    """
    prove_terms = partial(prove_score_terms, loaded, library)
    with_proof(proofs, f"score_terms{suffix}", list[str], prove_terms)
    pack_distance_products(loaded, library)
    if loaded.recurrent:
        progress("check_recurrent", 0, 1)
        install = partial(install_recurrent, loaded, library)
        with_proof(proofs, f"recurrent{suffix}", dict[str, ProvenModule], install)
    page = partial(install_own_attention, loaded, max_model_len=max_model_len)
    loaded = _replaced(proofs, f"own_attention{suffix}", list[OwnLayer], page)
    if loaded.device.type != "cpu":
        return loaded
    split = partial(install_latent, loaded, library)
    loaded = _replaced(proofs, f"latent{suffix}", dict[str, int], split)
    compress = partial(install_compressed, loaded, library)
    with_proof(proofs, f"compressed{suffix}", list[str], compress)
    return loaded


def _replaced(
    proofs: StartCache | None,
    name: str,
    type_: type[T],
    install: Callable[[T | None], tuple[LoadedModel, T]],
) -> LoadedModel:
    """Return the model that `install` returns; its proof is known, or is stored."""
    known = None if proofs is None else proofs.get(name, type_)
    loaded, proof = install(known)
    if proofs is not None and known is None:
        proofs.put(name, proof)
    return loaded


def _compute_gates_rowwise(*models: LoadedModel | None) -> None:
    """Make the gates in CPU modules' own code independent of a row's position in the step.

    This covers gates of attention, and gates around linear layers, such as hyper-connections.
    Mixtures of experts compute the gates of their rows separately, and a whole model's own code
    computes no scores.
    """
    for one in filter(None, models):
        if one.device.type != "cpu":
            continue
        for name in dict.fromkeys(layer.module_name for layer in one.layers):
            compute_rowwise(one.model.get_submodule(name))
        for module in one.model.modules():
            is_taken = {"paged_layer", "recurrent_layer", "forward"}.intersection(module.__dict__)
            kinds = {type(child) for child in module.children()}
            is_other = module is one.model or hasattr(module, "experts")
            if not is_taken and not is_other and nn.Linear in kinds:
                compute_rowwise(module)


def _make_executor(
    loaded: LoadedModel,
    draft: LoadedModel | None,
    library: NativeLibrary | None,
    worker: WorkerConfig,
) -> LayerExecutor | None:
    """Return the executor that replaces layers' modules; on CUDA it changes the models."""
    if library is not None:
        return NativeExecutor(library)
    if not uses_triton(loaded.device):
        return None
    from worker_proc.cuda.stack import TritonExecutor, install_kernels

    executor = TritonExecutor(is_batch_invariant=worker.batch_invariant)
    for one in filter(None, (loaded, draft)):
        install_kernels(one, executor)
    return executor


def _fuse(
    loaded: LoadedModel,
    library: NativeLibrary,
    proofs: StartCache | None,
    name: str,
    format: Format,
    *,
    on_tried: Callable[[int, int], None],
) -> None:
    """Fuse modules, with weights in `format`, and store their names as `name`.

    Then pack linear layers with groups, and matrices in modules' own code, whose modules are also
    stored.
    """
    fuse = partial(
        fuse_modules, loaded.model, library, loaded.dtype, format=format, on_tried=on_tried
    )
    with_proof(proofs, name, dict[str, int], fuse)
    pack_grouped_linears(loaded.model, library)
    matrices = partial(pack_own_matrices, loaded.model, loaded.row_shapes)
    stacks = partial(pack_own_stacks, loaded.model, loaded.argument_shapes)
    streams = partial(install_hyper_connections, loaded.model, loaded.row_shapes)
    for kind, shapes, pack in (
        ("matrices", loaded.row_shapes, matrices),
        ("stacks", loaded.argument_shapes, stacks),
        ("streams", loaded.row_shapes, streams),
    ):
        if not shapes:
            continue
        install = partial(pack, library, loaded.dtype)
        with_proof(proofs, f"{name}_{kind}", list[str], install)


def _load_grammars(vocabulary: Vocabulary, kind: ModelKind) -> GrammarCompiler:
    """Return a grammar compiler with its tokens loaded.

    If it lacks something, the reason is logged, unless the model generates no text anyway.
    """
    grammars = GrammarCompiler(vocabulary)
    try:
        grammars.load()
    except GrammarError as error:
        if kind is ModelKind.GENERATES:
            _log.info("requests with a grammar will be refused: %s", error)
    return grammars
