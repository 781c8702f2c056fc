"""Plots attention maps and convolution filters of one model, or of two side by side.

Independent of the kind of mixer: plots whatever the layers offer to a capture.
"""

import csv
import dataclasses
import re
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.analysis import inspection
from convbert_jax.analysis.inspection import LayerFilters, Occurrence
from convbert_jax.config import UserError
from convbert_jax.data import batching
from convbert_jax.data.readers.rows import decode_lines
from convbert_jax.data.tasks.labelled_text import Rows, pad_rows
from convbert_jax.inference import loading
from convbert_jax.inference.model import Model, TextModel
from convbert_jax.inference.network import NetworkOnDevice, captured, take
from convbert_jax.interop.sources import check_learned
from convbert_jax.recipes import tasks
from convbert_jax.recipes.results import InspectionResult
from convbert_jax.recipes.start import read_start
from convbert_jax.workdir import Workdir

_HELDOUT = 64  # number of held-out texts of a run to use
_SHORTEST = 8  # minimum tokens of a held-out text
_OCCURRENCES = 200  # maximum occurrences of a word
_MEMORY = 1 << 28  # bytes of attention maps in one batch
_NARROWEST = 32  # assumed minimum channels of a head, for _MEMORY
_ENDINGS = ("", "-beside")  # file name suffixes of the first and the second model


class InspectionError(UserError):
    """The model, the texts or the word do not allow an inspection."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """One model and the captured outputs of its layers."""

    model: Model
    texts: Sequence[str]
    rows: Rows
    occurrences: Sequence[Occurrence]
    sums: inspection.MapSums
    filters: Sequence[LayerFilters]
    blind: Sequence[str]  # messages about layers without capture

    @property
    def mixers(self) -> list[str]:
        """Name of the mixer of each layer."""
        return [str(layer.mixer) for layer in self.model.networks["main"].encoder.layers]


def inspect(
    path: str,
    *,
    beside: str | None = None,
    step: int | None = None,
    texts: str | None = None,
    word: str | None = None,
    layers: Sequence[int] = (),
    output: str | None = None,
) -> InspectionResult:
    """Plots average attention maps, their diagonal concentration, and the filters of a word.

    Args:
      path: a model that `convbert_jax.load` accepts.
      beside: a second model, for the same plots on the same texts.
      step: step of the checkpoint of `path`, default the newest.
      texts: file with one text per line, optionally `.gz`; default the beginnings of held-out
        documents of the pre-training run `path`.
      word: plot the convolution filters at every occurrence of this word.
      layers: layers whose filters are plotted; () for the first, middle and last.
      output: output folder, default WORKDIR/inside/step-N of a run.

    Raises:
      UserError: model, texts, word or layer do not exist, or no layer offers a capture.
    """
    model = _load(path, step)
    others = [_load(beside)] if beside else []
    folder = _choose_folder(path, model, output)
    read = _read_lines(texts) if texts else _heldout_texts(path, model, word)
    seen = [_look(each, read, word, layers) for each in (model, *others)]
    if word and not any(each.filters for each in seen):
        raise InspectionError(
            f"--word={word}: {' '.join(seen[0].blind)}", field="--word", value=word
        )
    folder.mkdir(parents=True, exist_ok=True)
    _draw(folder, seen, word, layers)
    _write(folder, seen, word)
    return InspectionResult(folder, _describe(seen, folder, word))


def _load(path: str, step: int | None = None) -> Model:
    model = loading.load(path, step=step)
    if isinstance(model, TextModel):
        raise InspectionError(
            f"{path} is a generative model (config.recipe='{model.config.recipe}'). Only encoders "
            "can be inspected.",
            field="config.recipe",
            value=model.config.recipe,
            path=path,
        )
    return model


def _choose_folder(path: str, model: Model, output: str | None) -> epath.Path:
    workdir = Workdir(path)
    if not output and not workdir.holds_run():
        raise InspectionError(
            f"{path} is not a run of this package. Set --output=FOLDER.",
            field="--output",
            path=path,
        )
    folder = storage.to_path(output) if output else workdir.inside(model.step)
    if not output:
        storage.check_links(workdir.path)
    if folder.exists() and not folder.is_dir():
        raise InspectionError(
            f"--output={folder} is a file. Use a folder.", field="--output", path=folder
        )
    return folder


def _read_lines(texts: str) -> list[str]:
    lines = decode_lines(storage.expand(texts), "utf-8")
    read = [line.strip() for _, line in lines]
    if not any(read):
        raise InspectionError(
            f"--input={texts} has no text. Write one text per line.", field="--input", path=texts
        )
    return [line for line in read if line]


def _heldout_texts(path: str, model: Model, word: str | None) -> list[str]:
    """Returns documents of held-out rows, cut at row ends; with `word`, only matching ones."""
    workdir = Workdir(path)
    if not workdir.holds_run() or model.config.spec.data != "data":
        raise InspectionError(
            f"{path} has no held-out texts. Pass a file with one text per line as --input=FILE.",
            field="--input",
            path=path,
        )
    config, _ = read_start(workdir.read_config(), workdir)
    data = tasks.open_data(config, workdir)
    check_learned(workdir, config, data.tokenizers)
    corpus = data.corpus
    found = []
    for text in _documents(batching.evaluation_batches(corpus, batch_size=_HELDOUT), model):
        if word is None or re.search(_pattern(word), text, re.IGNORECASE):
            found.append(text)
        if len(found) == _HELDOUT:
            break
    if not found and word:
        raise InspectionError(
            f"--word={word} does not occur in the held-out texts of {path}. Pass texts with "
            "--input=FILE.",
            field="--word",
            value=word,
            path=path,
        )
    if not found:
        raise InspectionError(
            f"{path} has no held-out texts. Pass texts with --input=FILE.",
            field="--input",
            path=path,
        )
    return found


def _pattern(word: str) -> str:
    return rf"(?<!\w){re.escape(word)}(?!\w)"


def _documents(batches, model: Model) -> Iterator[str]:
    for batch in batches:
        for tokens, ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for segment in range(1, int(ids.max()) + 1):
                document = tokens[ids == segment]
                if len(document) >= _SHORTEST:
                    yield model.tokenizer.decode(document)


def _look(model: Model, texts: Sequence[str], word: str | None, layers: Sequence[int]) -> _Seen:
    """Runs the model on all texts in float32 and collects maps and filters.

    Raises:
      InspectionError: no layer offers a capture, or `layers` does not match.
    """
    encoder = model.networks["main"].encoder
    if wrong := [layer for layer in layers if not 0 <= layer < encoder.depth]:
        raise InspectionError(
            f"--layers={wrong[0]}: {model.path} has layers 0 to {encoder.depth - 1}.",
            field="--layers",
            value=wrong[0],
            path=model.path,
        )
    network = NetworkOnDevice(model.networks["main"], jnp.float32)
    wanted = ("attention", "filters") if word else ("attention",)
    blind = _describe_blind(model, network, wanted)
    capture = tuple(name for name in wanted if any(name in offer for offer in network.offers))
    if not capture:
        raise InspectionError(
            f"{model.path} has nothing to plot: {' '.join(blind)}", path=model.path
        )
    rows, occurrences = _encode(model, texts, word)
    sums = inspection.MapSums(rows.by_token["tokens"].shape[1])
    filters: dict[int, list[np.ndarray]] = {}
    for text, arrays in enumerate(_run(model, network, rows, capture)):
        if arrays["attention"]:
            sums.add(arrays["attention"])
        for occurrence in occurrences:
            if occurrence.text == text:
                for layer, of_text in arrays["filters"].items():
                    filters.setdefault(layer, []).append(of_text[occurrence.token])
    found = [LayerFilters(layer, np.stack(each)) for layer, each in sorted(filters.items())]
    if layers and filters and not set(layers) & filters.keys():
        raise InspectionError(
            f"--layers={','.join(map(str, layers))}: these layers have no filters. Choose from "
            f"{', '.join(map(str, sorted(filters)))}.",
            field="--layers",
            value=",".join(map(str, layers)),
        )
    return _Seen(model, texts, rows, occurrences, sums, found, blind)


def _describe_blind(model: Model, network: NetworkOnDevice, wanted: Sequence[str]) -> list[str]:
    """Returns a message for each stage that does not offer all captures of `wanted`."""
    sentences, first = [], 0
    names = {"attention": "attention maps", "filters": "filters of a word"}
    for stage, offer in zip(model.networks["main"].encoder.stages, network.offers, strict=True):
        last = first + stage.depth - 1
        if lacks := [names[name] for name in wanted if name not in offer]:
            place = f"layer {first} has" if first == last else f"layers {first} to {last} have"
            more = ""
            if "filters" in offer and "filters" not in wanted:
                more = f", but {names['filters']}, with --word=WORD"
            sentences.append(f"{place} no {' and no '.join(lacks)}{more} ({stage.layer.mixer}).")
        first = last + 1
    return sentences


def _encode(model: Model, texts: Sequence[str], word: str | None) -> tuple[Rows, list[Occurrence]]:
    """Returns the padded rows of the texts and the occurrences of the word in them."""
    special, occurrences, pieces = model.tokenizer.special, [], []
    cut = 0
    for number, (ids, places) in enumerate(model.tokenizer.encode_with_offsets(texts)):
        kept = model.length - 2
        cut += len(ids) > kept
        pieces.append([special.cls, *ids[:kept], special.sep])
        if word:
            occurrences += inspection.find_word(word, number, texts[number], places[:kept])
    if cut:
        logging.warning(
            "%s: truncated %d of %d texts to %d tokens.", model.path, cut, len(texts), model.length
        )
    if word and not occurrences:
        raise InspectionError(
            f"--word={word} does not occur in the {len(texts)} texts for {model.path}. Pass texts "
            "with --input=FILE.",
            field="--word",
            value=word,
            path=model.path,
        )
    if len(occurrences) > _OCCURRENCES:
        logging.info("Using the first %d of %d occurrences.", _OCCURRENCES, len(occurrences))
    rows = pad_rows(pieces, max(map(len, pieces)), pad=special.pad)
    return rows, occurrences[:_OCCURRENCES]


def _run(
    model: Model, network: NetworkOnDevice, rows: Rows, capture: tuple[str, ...]
) -> Iterator[dict[str, dict[int, np.ndarray]]]:
    """Yields name -> layer -> captured array of each text, without padding.

    Shapes: attention [H, n, n], filters [n, H, K].
    """
    encoder, length = model.networks["main"].encoder, rows.by_token["tokens"].shape[1]
    heads = encoder.depth * max(1, encoder.hidden_size // _NARROWEST)
    at_once = max(1, _MEMORY // (4 * heads * length**2))
    starts = np.cumsum([0, *(stage.depth for stage in encoder.stages)])
    for start in range(0, len(rows), at_once):
        chosen = take(rows, np.arange(start, min(start + at_once, len(rows))))
        found = network.apply(chosen, captured, batch_size=at_once, capture=capture)
        for text, n in enumerate(chosen.lengths):
            seen: dict[str, dict[int, np.ndarray]] = {"attention": {}, "filters": {}}
            for name, arrays in found.items():
                stage, what = name.split("/")
                for i, of_layer in enumerate(arrays[text]):
                    kept = of_layer[:, :n, :n] if what == "attention" else of_layer[:n]
                    seen[what][int(starts[int(stage)]) + i] = kept
            yield seen


def _draw(
    folder: epath.Path, seen: Sequence[_Seen], word: str | None, asked: Sequence[int]
) -> None:
    for each, ending in zip(seen, _ENDINGS, strict=False):
        name, of_maps = each.model.path, each.sums.layers()
        if of_maps:
            title = f"{name}: mean attention of {each.sums.texts} texts"
            inspection.draw_maps(of_maps, title, folder / f"attention{ending}.png")
        drawn = inspection.chosen_layers([found.layer for found in each.filters], asked)
        chosen = [found for found in each.filters if found.layer in drawn]
        if chosen:
            title = f"{name}: filters of “{word}”, {len(each.occurrences)} times"
            picture = folder / f"filters{ending}.png"
            inspection.draw_filters(chosen, each.occurrences, title, picture)
    models = [(each.model.path, each.sums.layers(), each.sums.chance) for each in seen
              if each.sums.texts]  # fmt: skip
    if models:
        inspection.draw_concentration(models, inspection.WINDOW, folder / "concentration.png")


def _write(folder: epath.Path, seen: Sequence[_Seen], word: str | None) -> None:
    """Writes numbers.json, concentration.csv (per head), filters.csv (per filter) and maps.npz."""
    storage.write_json(folder / "numbers.json", [_numbers(each, word) for each in seen])
    by_head, by_filter, arrays = [], [], {}
    for each, ending in zip(seen, _ENDINGS, strict=False):
        name = each.model.path
        for layer in each.sums.layers():
            arrays[f"layer-{layer.layer}{ending}"] = layer.mean.astype(np.float32)
            for head, value in enumerate(layer.concentration):
                by_head.append((name, layer.layer, head, f"{value:.6f}", f"{each.sums.chance:.6f}"))
        for layer in each.filters:
            for where, of_heads in zip(each.occurrences, layer.filters, strict=True):
                for head, taps in enumerate(of_heads):
                    place = (name, layer.layer, head, where.text, where.token, where.snippet)
                    by_filter.append((*place, *(f"{tap:.6f}" for tap in taps)))
    if by_head:
        header = ("model", "layer", "head", "concentration", "chance")
        _write_table(folder / "concentration.csv", header, by_head)
        with storage.replacing(folder / "maps.npz") as file:
            np.savez_compressed(file, **arrays)
    if by_filter:
        header = ["model", "layer", "head", "text", "token", "snippet"]
        header += [f"tap {tap}" for tap in range(max(map(len, by_filter)) - len(header))]
        _write_table(folder / "filters.csv", header, by_filter)


def _write_table(file: epath.Path, header: Sequence[str], rows: Sequence[Sequence]) -> None:
    with storage.replacing(file, "w") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _numbers(seen: _Seen, word: str | None) -> dict:
    found = {"model": seen.model.path, "step": seen.model.step, "texts": len(seen.texts),
             "mixers": seen.mixers, "shows_nothing": list(seen.blind)}  # fmt: skip
    if seen.sums.texts:
        found |= {
            "tokens": seen.sums.tokens,
            "window": seen.sums.window,
            "chance": seen.sums.chance,
            "concentration": {
                layer.layer: layer.concentration.tolist() for layer in seen.sums.layers()
            },
        }
    if word:
        found |= {
            "word": word,
            "occurrences": len(seen.occurrences),
            "moved_by_context": {
                layer.layer: inspection.spread(layer.filters).tolist() for layer in seen.filters
            },
        }
    return found


def _describe(seen: Sequence[_Seen], folder: epath.Path, word: str | None) -> str:
    lines = []
    for each in seen:
        lines.append(f"{each.model.path}, {len(each.texts)} texts:")
        if each.sums.texts:
            shares = np.concatenate([layer.concentration for layer in each.sums.layers()])
            lines.append(
                f"  {shares.mean():.0%} of attention stays within {each.sums.window} positions "
                f"(single heads: {shares.min():.0%} to {shares.max():.0%}; chance level: "
                f"{each.sums.chance:.0%})"
            )
        if each.filters:
            moved = np.concatenate([inspection.spread(layer.filters) for layer in each.filters])
            lines.append(
                f'  the context of "{word}" ({len(each.occurrences)} occurrences) changes '
                f"{moved.mean():.0%} of its filters' weight (single heads: {moved.min():.0%} to "
                f"{moved.max():.0%})"
            )
        lines += [f"  {sentence}" for sentence in each.blind]
    return "\n".join([*lines, f"Plots and numbers: {folder}"])
