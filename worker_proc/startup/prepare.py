"""Loads a checkpoint, and rounds, fuses and packs its modules."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import torch
from torch import nn

from protocol.config import EngineConfig, KVCacheDtype, Quantization, WorkerConfig
from protocol.process.model_files import read_model_files
from worker_proc.adapters.sites import MatrixPart, Sites
from worker_proc.adapters.store import AdapterStore
from worker_proc.cuda.device import prepare_device, resolve_device, uses_triton
from worker_proc.decoder.stack import NativeExecutor
from worker_proc.errors import UnsupportedModel
from worker_proc.grammar.compiler import GrammarCompiler, GrammarError, Vocabulary
from worker_proc.loading.checkpoint_identity import checkpoint_identity
from worker_proc.loading.draft import check_draft
from worker_proc.loading.heap import return_freed_memory
from worker_proc.loading.layer_executor import LayerExecutor
from worker_proc.loading.loader import (
    CheckedModel,
    LoadedModel,
    check_model,
    load_checked,
)
from worker_proc.loading.mapped_pages import release_mapped_pages
from worker_proc.loading.prepared import PreparedModel
from worker_proc.loading.proofs import Proofs, find_proofs, with_proof
from worker_proc.loading.start_cache import StartCache
from worker_proc.modules.adapted_modules import adapt_modules, find_sites
from worker_proc.modules.coded_weights import dequantize_weights, without_kernels
from worker_proc.modules.compressed import install_compressed
from worker_proc.modules.experts.sized import pack_sized_experts
from worker_proc.modules.fusing import fuse_modules
from worker_proc.modules.grouped_linear import pack_grouped_linears
from worker_proc.modules.hyper_connections import install_hyper_connections
from worker_proc.modules.latent import install_latent
from worker_proc.modules.own_attention import OwnLayer, install_own_attention
from worker_proc.modules.own_matrices import pack_own_matrices, pack_own_stacks
from worker_proc.modules.packed_linear import PLAIN, Formats, can_pack, pack_linears
from worker_proc.modules.quantization import (
    FORMATS,
    check_coding_device,
    check_experts,
    check_values,
    formats_of,
    load_coding_library,
)
from worker_proc.modules.recurrent import ProvenModule, install_recurrent
from worker_proc.modules.score_terms import pack_distance_products, prove_score_terms
from worker_proc.native.build import start_building
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary, load_library
from worker_proc.native.packed_weights import Format
from worker_proc.parallel.division.sharding import check_division, shard
from worker_proc.parallel.share import Share
from worker_proc.parallel.stages import (
    Stage,
    StageParts,
    check_stages,
    connect_stage,
    only_stage,
    places,
)
from worker_proc.quantization.formats import is_quantized
from worker_proc.recurrent.rowwise import compute_activations_rowwise, compute_rowwise
from worker_proc.runner import ReportProgress
from worker_proc.startup.refusals import (
    check_cache,
    check_compressed,
    check_own_attention,
    check_score_terms,
    check_settings,
    check_stated_length,
    has_entries,
    rehearse_draft,
    rehearse_experts,
    rehearse_model,
)

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
    checked, checked_draft, library, parts = _check(
        config, device, kept, progress, stage, has_draft=has_draft
    )
    # No GPU holds the whole of a divided model.
    loaded = load_checked(checked if share.num_ranks == 1 else checked.on_host(), progress)
    passages = None if parts is None else connect_stage(loaded, parts, stage)
    shared: dict[str, MatrixPart] = {}
    if share.num_ranks > 1:
        loaded, shared = shard(loaded, share, device)
    draft = None if checked_draft is None else load_checked(checked_draft, progress)
    if device.type == "cpu":
        library = _library_for((loaded, draft), progress)
    proofs = None if kept is None else kept.with_kernels(library)
    _compute_states(loaded, library, proofs, progress)
    longest = config.model.max_model_len
    loaded = _replace_attention(loaded, library, proofs, longest)
    if draft is not None:
        _compute_states(draft, library, proofs, progress, "_draft")
        draft = _replace_attention(draft, library, proofs, longest, "_draft")
    _compute_gates_rowwise(loaded, draft)
    _pack_head(loaded, library)
    others = None if parts is None else parts.others(stage)
    sites = find_sites(loaded, shared, others) if config.lora.enable_lora else None
    if quantization is not None and library is not None:
        check_values(loaded, quantization, partial(progress, "check_weights"))
    formats = formats_of(quantization, is_quantized=loaded.codes is not None)
    _pack(loaded, library, proofs, progress, role="fused", formats=formats, rounded=quantization)
    if draft is not None:
        _pack(draft, library, proofs, progress, role="fused_draft")  # never rounded
    if library is not None:
        for one in filter(None, (loaded, draft)):
            compute_activations_rowwise(one.model)  # those that no kernel computes
    return_freed_memory()
    for directory in filter(None, (config.model.model, config.model.speculative_model)):
        release_mapped_pages(directory)
    vocabulary = Vocabulary(loaded.vocab_size, list(loaded.eos_token_ids), config.model.model)
    executor = _make_executor(loaded, draft, library, config.worker)
    grammars = _load_grammars(vocabulary)
    adapters = None if sites is None else _make_store(loaded, library, sites, config)
    return PreparedModel(
        loaded, library, grammars, executor, proofs, draft, adapters, checkpoint, files, passages
    )


def _check(
    config: EngineConfig,
    device: torch.device,
    kept: Proofs | None,
    progress: ReportProgress,
    stage: Stage,
    *,
    has_draft: bool,
) -> tuple[CheckedModel, CheckedModel | None, NativeLibrary | None, StageParts | None]:
    """Check the configured models and settings before weights are read.

    Returns the model, or a stage of it; its draft model; the kernels, if a setting needs them; and
    the parts of all stages, if there are several. `has_draft`: this rank has the draft model, if
    one is configured.
    """
    setting, quantization = _setting_with_kernels(config, device), config.model.quantization
    if setting is not None:
        check_coding_device(setting, device)
    elif device.type == "cpu" and not is_quantized(config.model.model):
        start_building()
    check_stated_length(config.model)
    proofs = None if kept is None else kept.without_kernels()
    checked = check_model(
        config.model.model,
        config.model.dtype,
        device,
        progress,
        proofs,
        max_model_len=config.model.max_model_len,
        num_ranks=config.parallel.tensor_parallel_size,
    )
    check_settings(checked, config)
    if config.parallel.num_ranks > 1:
        _check_parts(checked, config.parallel.tensor_parallel_size, progress)
    draft = check_draft(config.model, checked, progress) if has_draft else None
    rehearsal = rehearse_model(checked, quantization, proofs)
    parts, whole = None, checked
    if stage.num_stages > 1:
        parts = check_stages(checked, stage.num_stages)
        checked = only_stage(checked, parts, stage)
        layers, own = whole.inspected.probed.layers, checked.inspected.probed.layers
        rehearsal = rehearsal.of(layers, own)
    check_cache(checked, rehearsal, config)
    if draft is not None:
        _check_settings_of_draft(draft, config)
        rehearse_draft(draft, proofs)
    library = None
    if setting is None and any(has_entries(one) for one in (checked, draft) if one is not None):
        setting = "attention over compressed entries"
    if setting is not None:
        progress("compile_kernels", 0, 0)
        library = load_coding_library(setting)
    if quantization is not None and library is not None and checked.files is None:
        proofs = None if kept is None else kept.with_kernels(library)
        rehearse_experts(whole, quantization, library, proofs)
    return checked, draft, library, parts


def _check_parts(checked: CheckedModel, num_shares: int, progress: ReportProgress) -> None:
    """Check that ranks can have parts of a model, and report the kinds of all its codes."""
    if checked.files is not None:
        files = checked.files
        parts = (part for one in files.whole.values() for own in one.experts for part in own)
        files.report.state(weight.kind.value for weight in chain(files.weights.values(), parts))
    if num_shares > 1:
        check_division(checked, Share(0, num_shares))
        if checked.device.type != "cpu":  # on GPUs, kernels compute nothing else
            progress("compile_kernels", 0, 0)
            load_coding_library(f"tensor_parallel_size {num_shares}")


def _check_settings_of_draft(draft: CheckedModel, config: EngineConfig) -> None:
    check_own_attention(draft, config.model.max_model_len)
    check_compressed(draft, config)
    check_score_terms(draft, config)


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
                check_coding_device("the checkpoint's format", one.device)
                library = load_coding_library("the checkpoint's format")
            except UnsupportedModel as error:
                reason = str(error)
        if one.dtype not in NATIVE_DTYPES:
            reason = f"no kernel computes in {str(one.dtype).removeprefix('torch.')}"
        others = without_kernels(one.model)
        dequantize_weights(others, "it is not that of a linear layer, an embedding or experts")
        if reason:
            dequantize_weights(one.model.modules(), reason)
    return library


def describe_codes(loaded: LoadedModel, quantization: Quantization | None) -> str:
    """Describe the codes of the weights in memory, in words; empty: there are none."""
    if loaded.codes is None:
        return quantization or ""
    if quantization is None:
        return loaded.codes.description
    head = f"output layer {FORMATS[quantization].head.name.lower()}"
    return ", ".join(filter(None, (loaded.codes.description, head)))


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


def _setting_with_kernels(config: EngineConfig, device: torch.device) -> str | None:
    """Return a setting, with its value, that requires the native kernels, or None."""
    if config.lora.enable_lora:
        return "enable_lora"
    if config.model.quantization is not None:
        return f"quantization {config.model.quantization}"
    if config.cache.kv_cache_dtype is not KVCacheDtype.AUTO:
        return f"kv_cache_dtype {config.cache.kv_cache_dtype}"
    if (num_stages := config.parallel.pipeline_parallel_size) > 1:
        return f"pipeline_parallel_size {num_stages}"
    if (num_ranks := config.parallel.tensor_parallel_size) > 1 and device.type == "cpu":
        return f"tensor_parallel_size {num_ranks}"
    return None


def _take_terms(
    loaded: LoadedModel, library: NativeLibrary | None, proofs: StartCache | None, name: str
) -> None:
    """Prove modules whose scores have terms from rows, store the proof, and pack the terms."""
    with_proof(proofs, name, list[str], partial(prove_score_terms, loaded, library))
    pack_distance_products(loaded, library)


def _compute_states(
    loaded: LoadedModel,
    library: NativeLibrary | None,
    proofs: StartCache | None,
    progress: ReportProgress,
    suffix: str = "",
) -> None:
    """Make modules with score terms or recurrent states compute packed rows; store the proofs."""
    _take_terms(loaded, library, proofs, f"score_terms{suffix}")
    if not loaded.recurrent:
        return
    progress("check_recurrent", 0, 1)
    install = partial(install_recurrent, loaded, library)
    with_proof(proofs, f"recurrent{suffix}", dict[str, ProvenModule], install)


def _replace_attention(
    loaded: LoadedModel,
    library: NativeLibrary | None,
    proofs: StartCache | None,
    max_model_len: int | None,
    suffix: str = "",
) -> LoadedModel:
    """Replace attention that does more than call a registered function; see docs/attention.md."""
    loaded = _take_own_attention(loaded, proofs, max_model_len, f"own_attention{suffix}")
    if loaded.device.type != "cpu":
        return loaded
    loaded = _attend_to_latent_rows(loaded, library, proofs, f"latent{suffix}")
    _attend_to_entries(loaded, library, proofs, f"compressed{suffix}")
    return loaded


def _take_own_attention(
    loaded: LoadedModel, proofs: StartCache | None, max_model_len: int | None, name: str
) -> LoadedModel:
    """Page the attention that a model's own code computes, and store the proof as `name`."""
    known = None if proofs is None else proofs.get(name, list[OwnLayer])
    loaded, proven = install_own_attention(loaded, known, max_model_len=max_model_len)
    if proofs is not None and known is None:
        proofs.put(name, proven)
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


def _attend_to_latent_rows(
    loaded: LoadedModel, library: NativeLibrary | None, proofs: StartCache | None, name: str
) -> LoadedModel:
    """Replace multi-head latent attention, if proven, and store the proof as `name`."""
    known = None if proofs is None else proofs.get(name, dict[str, int])
    loaded, proven = install_latent(loaded, library, known)
    if proofs is not None and known is None:
        proofs.put(name, proven)
    return loaded


def _attend_to_entries(
    loaded: LoadedModel, library: NativeLibrary | None, proofs: StartCache | None, name: str
) -> None:
    """Make modules attend over compressed entries, and store the proof as `name`."""
    with_proof(proofs, name, list[str], partial(install_compressed, loaded, library))


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


def _load_grammars(vocabulary: Vocabulary) -> GrammarCompiler:
    """Return a grammar compiler with its tokens loaded; log the reason if it lacks something."""
    grammars = GrammarCompiler(vocabulary)
    try:
        grammars.load()
    except GrammarError as error:
        _log.info("requests with a grammar will be refused: %s", error)
    return grammars
