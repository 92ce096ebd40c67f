"""Checkpoints of others: what is read, and what is refused, without any outside file."""

import json
import math
import os
import struct
import subprocess
import sys
import tracemalloc

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file

from normjax.errors import UserError
from normjax.foreign import texts
from normjax.foreign.mappings import MODEL_TYPES, REFUSED
from normjax.foreign.opened import open_model
from normjax.foreign.tensors import Gguf, SafeTensors, open_tensors
from tests import foreign_files as made

MODEL, PARAMS = made.decoder()
TENSORS = made.llama_tensors(PARAMS)
LOGITS = np.asarray(MODEL.apply(PARAMS, made.TOKENS))


def refused(call, *words):
    """Hold an error to one line with all of the words."""
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, (word, text)
    return text


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_read_back_to_the_bit(tmp_path, shards):
    made.write_folder(tmp_path, TENSORS, shards=shards)
    model = open_model(tmp_path)
    assert_same(model.params(), PARAMS)
    assert model.config == MODEL.config.__class__(**vars(MODEL.config) | {"init": "auto"})
    assert (model.model_type, model.vocabulary, model.window) == ("llama", 64, 16)
    assert model.source.form == "safetensors" and len(model.source.files) == shards
    np.testing.assert_array_equal(model.decoder().apply(model.params(), made.TOKENS), LOGITS)


def test_blocks_one_at_a_time_are_the_decoder(tmp_path):
    made.write_folder(tmp_path, TENSORS)
    model = open_model(tmp_path)
    decoder, ends = model.decoder(), model.ends()
    h = decoder.embed(ends, made.TOKENS)
    for block in (1, 2):
        own = model.block(block)
        assert_same(own, jax.tree.map(lambda x, i=block - 1: x[i], PARAMS["blocks"]))
        h = decoder.block(model.layer(block), h)
    np.testing.assert_allclose(decoder.readout(ends, h), LOGITS, rtol=0, atol=1e-5)
    for block in (0, 3):
        refused(lambda b=block: model.block(b), f"block={block}", "from 1 to 2")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_numbers_are_widened(tmp_path, dtype):
    narrow = {k: v.astype(dtype) for k, v in TENSORS.items()}
    made.write_folder(tmp_path, narrow)
    got = open_model(tmp_path).ends()["embedding"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, narrow["model.embed_tokens.weight"].astype(np.float32))


def test_names_without_their_root_are_found(tmp_path):
    bare = {k.removeprefix("model."): v for k, v in TENSORS.items()}
    made.write_folder(tmp_path, bare)
    assert_same(open_model(tmp_path).params(), PARAMS)


KINDS = (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_a_gguf_file_is_read_as_its_dequantized_weights(tmp_path, kind):
    path = tmp_path / "model.gguf"
    stored = made.gguf_tensors(TENSORS)
    held = made.write_gguf(path, stored, kind)
    model = open_model(path)
    got = model.params()
    # What the file holds, put back where our tree has it: by the position of each number.
    places = {k: np.arange(v.size).reshape(v.shape) for k, v in TENSORS.items()}
    back = {}
    names = dict(zip(TENSORS, stored, strict=True))
    for name, order in zip(TENSORS, made.gguf_tensors(places).values(), strict=True):
        flat = np.empty(order.size, np.float32)
        flat[order.ravel()] = held[names[name]].ravel()
        back[name] = flat.reshape(order.shape)
    expected = made.llama_tensors(got)
    assert expected.keys() == back.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(expected[name], value, err_msg=name)
    if kind == Q.F32:
        assert_same(got, PARAMS)
        eps = np.float32(1e-5)  # the header's numbers are float32
        assert model.config.norm_eps == pytest.approx(float(eps), rel=1e-12)
        logits = np.asarray(model.decoder().apply(got, made.TOKENS))
        np.testing.assert_allclose(logits, LOGITS, rtol=0, atol=1e-5)
    assert model.source.form == "gguf" and model.model_type == "llama"


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda k: k.name)
def test_blocks_of_256_are_dequantized_piece_by_piece(tmp_path, kind, monkeypatch):
    from normjax.foreign import tensors

    monkeypatch.setattr(tensors, "_CHUNK", 3 * 512)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 60, (40, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    held = Gguf(tmp_path / "x.gguf", "model=x")
    assert held.tensor("x").shape == (40, 512) and held.tensor("x").dtype == kind.name
    np.testing.assert_array_equal(held.read("x"), gguf.quants.dequantize(raw, kind))
    assert held.read("x").any()


@pytest.mark.parametrize(
    ("form", "dtype"), [("gguf", Q.F32), ("gguf", Q.Q8_0), ("folder", "f4"), ("folder", "f2")]
)
def test_reading_one_tensor_holds_that_tensor(tmp_path, form, dtype):
    """Opening three tensors of 8 MB holds none, a read one of them: float32, and what is stored."""
    large = {f"{i}": np.full((1024, 2048), i, np.float32) for i in range(3)}
    path = tmp_path / "x.gguf" if form == "gguf" else tmp_path
    if form == "gguf":
        made.write_gguf(path, large, dtype)
    else:
        made.write_folder(path, {k: v.astype(dtype) for k, v in large.items()})
    size = large["1"].nbytes
    open_tensors(path, "model=x").read("1")  # what is imported on the way
    tracemalloc.start()
    held = open_tensors(path, "model=x")
    opened = tracemalloc.get_traced_memory()[1]
    got = held.read("1")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened < size / 20
    np.testing.assert_allclose(got, 1, atol=1e-3)
    # Blocks are dequantized by pieces, of which the library holds some copies; halves are read
    # whole before they are widened.
    assert size <= peak < (1.6 if dtype == "f2" else 3.0 if dtype == Q.Q8_0 else 1.05) * size


# --- what is refused ------------------------------------------------------------------------------


def changed(**settings):
    return made.SETTINGS | settings


SETTINGS = {
    "an unknown type": ({"model_type": "lama"}, ["model_type=lama", "did you mean 'llama'"]),
    "no type": ({"model_type": None}, ["model_type=None", "must be one of"]),
    "scaled positions": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "must be default"]),
    "scaled, as before": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["'linear'", "must be default"]),
    "scaled, as llama 3": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["'llama3'"]),
    "a nonlinearity": ({"hidden_act": "mish"}, ["hidden_act='mish'", "silu"]),
    "a size of text": ({"hidden_size": "64"}, ["hidden_size='64'", "whole number"]),
    "a missing size": ({"vocab_size": None}, ["vocab_size=None"]),
    "no number": ({"rms_norm_eps": math.inf}, ["rms_norm_eps=inf"]),
    "no flag": ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'", "true or false"]),
    "heads that do not divide": ({"num_key_value_heads": 3}, ["kv_heads=3", "must divide"]),
    "two at once": ({"hidden_act": "x", "vocab_size": 0}, ["hidden_act='x'", "vocab_size=0"]),
    "a layer of another kind": (
        {"model_type": "mistral", "sliding_window": 4,
         "layer_types": ["linear_attention", "full_attention"]}, ["layer_types", "do not have"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_refused_by_name(tmp_path, case):
    settings, words = SETTINGS[case]
    made.write_folder(tmp_path, TENSORS, changed(**settings))
    refused(lambda: open_model(tmp_path), f"model={tmp_path}", *words)


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_need_another_branch_are_refused_with_the_reason(tmp_path, name):
    made.write_folder(tmp_path, TENSORS, changed(model_type=name))
    refused(lambda: open_model(tmp_path), f"model_type={name} is not read", REFUSED[name])
    assert name not in MODEL_TYPES


def without(name):
    return {k: v for k, v in TENSORS.items() if k != name}


Q0 = "model.layers.0.self_attn.q_proj.weight"
DAMAGE = {
    "missing": (without(Q0), [f"{Q0} is missing", "expected with shape (64, 64)"]),
    "extra": (TENSORS | {"extra": np.zeros(3, np.float32)}, ["extra of shape (3,) has no place"]),
    "misshapen": (
        TENSORS | {Q0: np.zeros((64, 32), np.float32)},
        [Q0, "shape (64, 32)", "expected (64, 64)"]),
    "of another dtype": (
        TENSORS | {Q0: TENSORS[Q0].astype(np.float64)}, [Q0, "stored as F64", "BF16"]),
    "a bias": (
        TENSORS | {Q0.replace("weight", "bias"): np.zeros(64, np.float32)}, ["q_proj.bias"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_tensors_that_do_not_fit_are_named_with_their_shapes(tmp_path, case):
    tensors, words = DAMAGE[case]
    made.write_folder(tmp_path, tensors)
    refused(lambda: open_model(tmp_path), *words)


def test_all_problems_are_said_at_once_and_not_too_many(tmp_path):
    made.write_folder(tmp_path, {k: v for k, v in TENSORS.items() if "layers.0" not in k})
    refused(lambda: open_model(tmp_path), "layers.0.input_layernorm", "and 1 more")


def test_buffers_that_hold_nothing_learned_are_passed_over(tmp_path):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    made.write_folder(tmp_path, TENSORS | more)
    assert_same(open_model(tmp_path).params(), PARAMS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tensor_with_nan_is_refused_when_it_is_read(tmp_path, value):
    broken = TENSORS[Q0].copy()
    broken[3, 5] = value
    made.write_folder(tmp_path, TENSORS | {Q0: broken})
    model = open_model(tmp_path)
    model.ends(), model.block(2)
    refused(lambda: model.block(1), Q0, "(64, 64)", "NaN")


def test_an_output_layer_beside_tied_embeddings_is_refused_where_it_differs(tmp_path):
    made.write_folder(tmp_path, TENSORS, changed(tie_word_embeddings=True))
    refused(lambda: open_model(tmp_path), "lm_head.weight differs", "tie_word_embeddings")
    same = TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"].copy()}
    made.write_folder(tmp_path, same, changed(tie_word_embeddings=True))
    assert "output" not in open_model(tmp_path).ends()


def overwrite(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def header_of(tensors_json):
    return struct.pack("<Q", len(tensors_json)) + tensors_json


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def no_header(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def named_twice(folder):
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = b"{" + entry + b"," + entry + b"}"
    (folder / "model.safetensors").write_bytes(header_of(text) + b"\0" * 4)


def wrong_size(folder):
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(header_of(text) + b"\0" * 4)


def a_pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def linked_out(folder):
    inner = folder / "inner"
    inner.mkdir()
    os.rename(folder / "model.safetensors", folder.parent / "outside.safetensors")
    os.symlink(folder.parent / "outside.safetensors", folder / "model.safetensors")


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def no_config(folder):
    (folder / "config.json").unlink()


def bad_config(folder):
    (folder / "config.json").write_text("{")


def config_twice(folder):
    (folder / "config.json").write_text('{"model_type": "llama", "model_type": "gpt2"}')


def list_config(folder):
    (folder / "config.json").write_text("[]")


FILES = {
    cut: ["model.safetensors", "download it again"],
    no_header: ["cut short, or no safetensors file"],
    named_twice: ["'a' is named twice"],
    wrong_size: ["model.safetensors", "download it again"],
    a_pipe: ["is a pipe", "pass a plain file"],
    linked_out: ["links out of its folder", "cp -L"],
    pickled: ["pytorch_model.bin", "convert them to safetensors"],
    no_config: ["has no config.json"],
    bad_config: ["config.json", "is no JSON"],
    config_twice: ["'model_type' is named twice"],
    list_config: ["must be a JSON object"],
}


@pytest.mark.parametrize("damage", FILES, ids=lambda f: f.__name__)
def test_damaged_folders_are_refused(tmp_path, damage):
    folder = tmp_path / "model"
    folder.mkdir()
    made.write_folder(folder, TENSORS)
    open_model(folder)
    damage(folder)
    refused(lambda: open_model(folder), f"model={folder}", *FILES[damage])


def test_a_link_inside_of_the_folder_is_followed(tmp_path):
    made.write_folder(tmp_path, TENSORS)
    os.rename(tmp_path / "model.safetensors", tmp_path / "blob")
    os.symlink("blob", tmp_path / "model.safetensors")
    assert_same(open_model(tmp_path).params(), PARAMS)


def _index(change):
    def damage(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(folder, index["weight_map"])
        path.write_text(json.dumps(index))

    return damage


INDEXES = {
    "elsewhere": (lambda f, m: m.update({Q0: "../x.safetensors"}), ["'../x.safetensors'", Q0]),
    "a pickle": (lambda f, m: m.update({Q0: "x.bin"}), ["'x.bin'"]),
    "no text": (lambda f, m: m.update({Q0: 3}), ["is to be in 3"]),
    "empty": (lambda f, m: m.clear(), ["weight_map"]),
    "in another file": (
        lambda f, m: m.update({Q0: next(v for v in m.values() if v != m[Q0])}),
        [Q0, "does not hold it"]),
    "not named": (lambda f, m: m.pop(Q0), [Q0, "does not name"]),
    "missing file": (lambda f, m: (f / m[Q0]).unlink(), ["is missing; download it"]),
    "held twice": (
        lambda f, m: save_file(TENSORS, f / next(v for v in m.values() if v != m[Q0])),
        ["as does"]),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_its_files_contradict_is_refused(tmp_path, case):
    change, words = INDEXES[case]
    made.write_folder(tmp_path, TENSORS, shards=2)
    open_model(tmp_path)
    _index(change)(tmp_path)
    refused(lambda: open_model(tmp_path), *words)


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.pth", "x.safetensors", "x.gguf", "gone"])
def test_other_files_are_refused_with_the_fix(tmp_path, name):
    path = tmp_path / name
    if name != "gone":
        path.write_bytes(b"abcdefgh")
    word = {".bin": "convert", ".pt": "convert", ".pth": "convert", ".gguf": "is no GGUF file",
            ".safetensors": "pass the folder"}.get(path.suffix, "there is no such")  # fmt: skip
    refused(lambda: open_model(path), str(path), word)


def test_a_folder_without_weights_is_refused(tmp_path):
    refused(lambda: SafeTensors(tmp_path, "model=x"), "has no model.safetensors", "pass a folder")


# --- GGUF that lies -------------------------------------------------------------------------------


def gguf_file(tmp_path, tensors=None, **more):
    path = tmp_path / "model.gguf"
    path.unlink(missing_ok=True)
    made.write_gguf(path, tensors or made.gguf_tensors(TENSORS), **more)
    return path


def test_a_gguf_file_that_is_cut_anywhere_is_refused(tmp_path):
    path = gguf_file(tmp_path)
    data = path.read_bytes()
    start = Gguf(path, "model=x")._held["token_embd.weight"].start
    for size in (1, 3, 7, 9, 24, 40, 100, 300, 600, start - 40, start + 10, len(data) - 100):
        path.write_bytes(data[:size])
        refused(lambda: open_model(path), f"model={path}")
    path.write_bytes(b"")
    refused(lambda: open_model(path), "is empty")


def test_counts_beyond_the_file_are_refused_at_once(tmp_path):
    path = gguf_file(tmp_path)
    data = path.read_bytes()
    for at in (8, 16):  # tensors, keys
        path.write_bytes(data[:at] + struct.pack("<Q", 2**60) + data[at + 8 :])
        refused(lambda: open_model(path), "1,152,921,504,606,846,976 entries")
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for kind in (4, 8):  # a list of 2^60 numbers, of 2^60 texts
        path.write_bytes(header + struct.pack("<IIQ", 9, kind, 2**60) + b"\0" * 64)
        refused(lambda: open_model(path), f"model={path}")
    path.write_bytes(header + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 64)
    refused(lambda: open_model(path), "type 9")
    path.write_bytes(header + struct.pack("<I", 77) + b"\0" * 64)
    refused(lambda: open_model(path), "unknown type 77")


def test_versions_that_we_do_not_know_are_refused(tmp_path):
    path = gguf_file(tmp_path)
    for version in (1, 4, 3 << 24):
        overwrite(path, 4, struct.pack("<I", version))
        refused(lambda: open_model(path), f"version {version}")


def entry(name, shape, kind, offset):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", kind, offset)


ENTRIES = {
    "twice": ([(b"a", (4,), 0, 0), (b"a", (4,), 0, 32)], ["holds a twice"]),
    "overlapping": ([(b"a", (16,), 0, 0), (b"b", (4,), 0, 32)], ["b overlaps a"]),
    "beyond the end": ([(b"a", (4,), 0, 2**62)], ["a is to be at byte"]),
    "not aligned": ([(b"a", (4,), 0, 4)], ["a is to be at byte"]),
    "of an unknown type": ([(b"a", (4,), 99, 0)], ["unknown type 99"]),
    "broken blocks": ([(b"a", (33,), 8, 0)], ["in blocks of 32"]),
    "too many dimensions": ([(b"a", (1,) * 5, 0, 0)], ["5 dimensions"]),
    "a product beyond all": ([(b"a", (2**40, 2**40), 0, 0)], ["has shape"]),
}


@pytest.mark.parametrize("case", [*ENTRIES, "right"])
def test_entries_are_held_against_the_file(tmp_path, case):
    entries, words = ENTRIES.get(case, ([(b"a", (8,), 0, 0), (b"b", (4,), 0, 32)], []))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), 0)
    head += b"".join(entry(*each) for each in entries)
    path = tmp_path / "x.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + b"\0" * 128)
    if words:
        refused(lambda: Gguf(path, "model=x"), *words)
    else:
        assert Gguf(path, "model=x").names() == ["a", "b"]


HEADERS = {
    "an architecture": ({"architecture": "mamba"}, ["general.architecture=mamba", "llama"]),
    "an unknown key": ({"keys": made.KEYS | {"odd": 3}}, ["llama.odd=3", "do not know"]),
    "experts": ({"keys": made.KEYS | {"expert_count": 8}}, ["expert_count=8", "do not have"]),
    "part of a head": (
        {"keys": made.KEYS | {"rope.dimension_count": 8}}, ["dimension_count=8", "16 features"]),
    "scaling": ({"more": [("add_string", "llama.rope.scaling.type", "yarn")]}, ["=yarn"]),
    "heads by layer": (
        {"more": [("add_array", "llama.attention.key_length", [16, 16])]}, ["head_dim=[16, 16]"]),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_asks_for_more_is_refused(tmp_path, case):
    more, words = HEADERS[case]
    path = gguf_file(tmp_path, **more)
    refused(lambda: open_model(path), *words)


def test_tensors_of_a_gguf_file_are_named_as_it_names_them(tmp_path):
    tensors = made.gguf_tensors(TENSORS)
    tensors.pop("blk.1.attn_k.weight")
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    path = gguf_file(tmp_path, tensors)
    refused(lambda: open_model(path), "blk.1.attn_k.weight is missing", "rope_freqs.weight of")


def test_a_quantization_that_we_do_not_read_is_named(tmp_path):
    path = gguf_file(tmp_path, kind=Q.Q5_0)
    refused(lambda: open_model(path), "stored as Q5_0", "Q4_K", "blk.0.attn_q.weight")


def test_a_gguf_file_without_an_output_layer_is_tied(tmp_path):
    tensors = made.gguf_tensors(TENSORS)
    tensors.pop("output.weight")
    model = open_model(gguf_file(tmp_path, tensors))
    assert model.config.tied and "output" not in model.ends()


# --- texts ----------------------------------------------------------------------------------------


def alphabet():
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary(tmp_path, pre="smollm", kind="gpt2", tokens=None, merges=("h e", "1 2"), more=()):
    tokens = [*alphabet(), "he", "12"] if tokens is None else tokens
    path = tmp_path / "texts.gguf"
    path.unlink(missing_ok=True)
    told = [("add_string", "tokenizer.ggml.model", kind), ("add_string", "tokenizer.ggml.pre", pre),
            ("add_array", "tokenizer.ggml.tokens", list(tokens)),
            ("add_array", "tokenizer.ggml.merges", list(merges)), *more]  # fmt: skip
    made.write_gguf(path, {"x": np.zeros(4, np.float32)}, more=told)
    return path


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["he", "Ġ", "12"]), ("smollm", ["he", "Ġ", "1", "2"]),
        ("llama-bpe", ["he", "Ġ", "12"]), ("qwen2", ["he", "Ġ", "1", "2"]),
    ],
)  # fmt: skip
def test_a_vocabulary_of_gguf_cuts_numbers_as_its_kind_does(tmp_path, pre, pieces):
    told = [("add_bool", "tokenizer.ggml.add_bos_token", False)]
    tokenizer = texts.open_tokenizer(vocabulary(tmp_path, pre, more=told))
    assert tokenizer.pieces(tokenizer.encode("he 12")) == pieces
    assert tokenizer.size == 258


def test_a_text_begins_as_the_vocabulary_says(tmp_path):
    told = [("add_bool", "tokenizer.ggml.add_bos_token", True),
            ("add_uint32", "tokenizer.ggml.bos_token_id", 3)]  # fmt: skip
    tokenizer = texts.open_tokenizer(vocabulary(tmp_path, more=told))
    assert tokenizer.encode("he") == [3, 256] and tokenizer.encode("he", special=False) == [256]
    lost = [told[0], ("add_uint32", "tokenizer.ggml.bos_token_id", 999)]
    refused(lambda: texts.open_tokenizer(vocabulary(tmp_path, more=lost)), "bos_token_id=999")


VOCABULARIES = {
    "another model": ({"kind": "llama"}, ["tokenizer.ggml.model=llama", "gpt2"]),
    "another cut": ({"pre": "deepseek-llm"}, ["tokenizer.ggml.pre=deepseek-llm", "smollm"]),
    "a token twice": ({"tokens": ["a", "b", "a"], "merges": ["a b"]}, ["lists a token twice"]),
    "a merge of three": ({"merges": ["h e l"]}, ["must be two tokens"]),
    "a merge of none": ({"merges": ["h zz"]}, ["tokenizer.ggml.merges"]),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_vocabularies_that_we_do_not_read_are_refused(tmp_path, case):
    more, words = VOCABULARIES[case]
    path = vocabulary(tmp_path, **more)
    refused(lambda: texts.open_tokenizer(path), *words)


def test_bytes_without_a_token_are_refused_and_not_dropped(tmp_path):
    letters = [x for x in alphabet() if x != "q"]
    tokenizer = texts.open_tokenizer(vocabulary(tmp_path, tokens=[*letters, "bc"], merges=["b c"]))
    assert len(tokenizer.encode("abc")) == 2
    refused(lambda: tokenizer.encode("abq"), "no token for some bytes")


def test_tokenizer_json_is_read_and_never_cut_or_filled(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = texts.open_tokenizer(path)
        assert tokenizer.encode("a b c a") == [0, 1, 2, 0] and tokenizer.size == 3
        assert tokenizer.pieces([1, 77]) == ["b", "?"]
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(lambda: texts.open_tokenizer(tmp_path), "is no tokenizer")
    (tmp_path / "tokenizer.json").unlink()
    refused(lambda: texts.open_tokenizer(tmp_path), "has no tokenizer.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]), (b"1 x", ["word 2", "'x'"]), (b"1 -2", ["'-2'"]),
        (b"3 64", ["word 2 is 64", "from 0 to 63"]), (b"9" * 400, ["word 1"]),
        (b"\xff", ["word 1"]),
        (b" 1\n2\t63 ", None),
    ],
)  # fmt: skip
def test_ids_from_a_file(tmp_path, content, words):
    path = tmp_path / "ids.txt"
    path.write_bytes(content)
    if words is None:
        assert texts.read_ids(path, 64) == [1, 2, 63]
    else:
        refused(lambda: texts.read_ids(path, 64), f"tokens={path}", *words)
    refused(lambda: texts.read_ids(tmp_path / "gone", 64), "no such file")


def test_nothing_of_the_hub_is_imported():
    code = (
        "import sys, normjax.foreign.opened, normjax.foreign.texts, tokenizers, gguf, safetensors\n"
        "assert 'huggingface_hub' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
