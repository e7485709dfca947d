"""Files of a run, which are written atomically. The file `manifest.json` states which round was completed last."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit._utils import files
from distillkit.locking import locked
from fl._codec import decode, encode
from fl.message import Message, Tensors

_FORMAT = "distillkit.run/1"
_PREVIOUS = "manifest.previous.json"


Require = Callable[[Mapping[int, str]], object]


class CheckpointError(RuntimeError):
    """Error: a file of a run cannot be written or read, or belongs to another run. The message names the file."""


class OtherSettings(CheckpointError):
    """Error: the folder holds a run with other options, such as another method, other data or another seed."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees either the complete old contents or the complete new contents.

    Args:
        path: path of the file; its folder is created.
        data: complete new contents of the file.

    Raises:
        CheckpointError: the file cannot be written, for example because the disk is full; the old file is kept.
    """
    try:
        files.write_atomically(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; the old file is kept") from error


def remove(path: Path) -> None:
    """Delete the file at `path`, if there is one.

    Raises:
        CheckpointError: the file cannot be deleted, for example because it is a folder.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be deleted: {error.strerror or error}") from error


def read_message(path: Path) -> tuple[Message, dict[str, str]]:
    """Read a message and its metadata from the file at `path`.

    Raises:
        CheckpointError: the file is missing, incomplete or altered.
    """
    data = files.read_bytes(path, CheckpointError)
    try:
        return decode(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a usable checkpoint: {error}") from error


def read_history(path: Path, *, torn: bool = False) -> list[dict[str, Any]]:
    """Read the rows of a run's `history.jsonl`, one for each of the rounds 1, 2, 3 and so on.

    Args:
        path: path of the file. The result is an empty list if there is no such file.
        torn: whether to ignore a half-written last line, which a killed process may leave.

    Raises:
        CheckpointError: a line is damaged, or the rounds are not consecutive (for example because two processes
            wrote the file).
    """
    from distillkit.study.history import RecordError, read_rows

    try:
        return read_rows(path, torn=torn)
    except RecordError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True)
class Restored:
    """Contents of a checkpoint, as `Store.restore` returns them.

    Attributes:
        round: index of the last completed round.
        state: the server's state after that round.
        metadata: values that the transport needs when the run is resumed; see `Transport.metadata`.
        changes: one mapping for each round in which a `ClientRecord` changed, in order. It maps the client's index to
            the new record, as a JSON value.
        rows: rows of the history for all completed rounds.
    """

    round: int
    state: Message
    metadata: dict[str, str]
    changes: list[dict[str, Any]]
    rows: list[dict[str, Any]]


class Store:
    """Folder of one run: `config.json`, `history.jsonl`, `checkpoint/`, and `transcript/` on request.

    The file `checkpoint/manifest.json` states which round was completed last. It is written after all other files of a
    round, so a round that is killed halfway does not count. The previous checkpoint is kept, and `restore` returns to
    it if the last one is damaged.

    Args:
        out: path of the folder.

    Attributes:
        out: path of the folder.
        folder: path of the subfolder `checkpoint/`.
        memories: path of the folder for the values that clients keep between rounds.
        unfinished: folder with the state of clients' unfinished work, by round and client; see `Client.scratch`.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / "checkpoint"
        self.memories, self.unfinished = self.folder / "clients", self.folder / "unfinished"
        self._records = self.folder / "clients.jsonl"
        self._history_sum, self._records_sum = hashlib.sha256(), hashlib.sha256()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Lock the run's folder against other processes, for the duration of a `with` block.

        Raises:
            distillkit.locking.InUse: another process, or another call in this process, has the lock. The message names
                the lock's owner.
            CheckpointError: the folder cannot be created or written.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.out / ".owner.lock", f"the run in {self.out}"))
            except OSError as error:
                raise CheckpointError(f"cannot write in {self.out}: {error.strerror or error}") from error
            yield

    def key(self) -> bytes:
        """Return the secret key for the fingerprints of the data in a private run's `config.json`.

        Without the key, these fingerprints reveal nothing about the data. The key is drawn when the run starts, and is
        kept in `checkpoint/`, which should not be shared.

        Raises:
            CheckpointError: the folder holds a run, but the file with the key cannot be read.
        """
        path = self.folder / "identity.key"
        if not self.exists():
            write_atomically(path, secrets.token_bytes(32))
        try:
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read, so the data cannot be compared with the run's") from error

    def exists(self) -> bool:
        """Return whether the folder contains the files of a run."""
        return (self.out / "config.json").exists() or (self.folder / "manifest.json").exists()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write the first files of a new run: `config.json` with the contents `config`, and an empty history."""
        write_atomically(self.out / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        write_atomically(self.out / "history.jsonl", b"")
        self._set_aside_messages(from_round=0)
        self._history_sum, self._records_sum = hashlib.sha256(), hashlib.sha256()
        remove(self._records)

    def manifest(self) -> dict[str, Any] | None:
        """Return the contents of `manifest.json`, which describes the last checkpoint; None if no round was completed.

        Raises:
            CheckpointError: the file is damaged, or was not written by this library.
        """
        return _read_manifest(self.folder / "manifest.json")

    def commit(
        self,
        round_number: int,
        run: str,
        state: Message,
        models: Mapping[str, Tensors],
        metadata: Mapping[str, str] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the checkpoint of a round, which makes it the last completed round.

        Args:
            round_number: index of the round.
            run: fingerprint of the run's options. `restore` refuses a checkpoint with another fingerprint.
            state: the server's state after the round.
            models: state dicts of the global models, by model name.
            metadata: values that the transport needs when the run is resumed; see `Transport.metadata`.
            changes: `ClientRecord`s that changed in this round, as JSON values by client index.
        """
        server = f"server.{round_number}.safetensors"
        write_atomically(self.folder / server, encode(state, {"run": run, "round": str(round_number)}))
        self.write_models(models)
        if changes:
            self._records_sum.update(self._append(self._records, {"round": round_number, "clients": changes}))
        before = self.manifest() or {}
        if before:
            write_atomically(self.folder / _PREVIOUS, (json.dumps(before) + "\n").encode())
        place = {"round": round_number, "run": run, "server": server, "transport": dict(metadata or {})}
        manifest = {"format": _FORMAT, **place, "sums": self._sums()}
        write_atomically(self.folder / "manifest.json", (json.dumps(manifest) + "\n").encode())
        shutil.rmtree(self.unfinished, ignore_errors=True)
        for old in self.folder.glob("server.*.safetensors"):
            if old.name not in (server, before.get("server")):
                remove(old)

    def write_models(self, models: Mapping[str, Tensors]) -> None:
        """Write one safetensors file for each global model, unless the file has the same contents already.

        Args:
            models: state dicts of the global models, by model name.
        """
        from safetensors.torch import save

        for name, model in models.items():
            path = self.folder / f"model{f'-{name}' if name else ''}.safetensors"
            data = save(files.contiguous_cpu(model))
            if not path.is_file() or path.read_bytes() != data:
                write_atomically(path, data)

    def _sums(self) -> dict[str, str]:
        """Return the checksums of the files that grow, and of `config.json`."""
        config = (self.out / "config.json").read_bytes() if (self.out / "config.json").exists() else b""
        return {
            "config.json": hashlib.sha256(config).hexdigest(),
            "history.jsonl": self._history_sum.hexdigest(),
            "checkpoint/clients.jsonl": self._records_sum.hexdigest(),
        }

    def restore(self, run: str, require: Require = lambda versions: None) -> Restored | None:
        """Read the last checkpoint, and delete lines of the history that were written after it.

        If the last checkpoint is damaged, a warning is issued, and the previous checkpoint is restored.

        Args:
            run: fingerprint of the run's options. A checkpoint with another fingerprint is not restored.
            require: function that checks the clients' memories, given their versions by client index.

        Returns:
            The contents of the checkpoint, or None if no round was completed.

        Raises:
            CheckpointError: the last checkpoint is damaged, incomplete, or has another fingerprint, and the previous
                checkpoint is missing or cannot be restored either. The message names the file.
        """
        try:
            return self._restore(self.manifest(), run, require)
        except CheckpointError as error:
            previous = self.folder / _PREVIOUS
            try:
                manifest = _read_manifest(previous)
                found = self._restore(manifest, run, require) if manifest is not None else None
            except CheckpointError:
                found = None
            if found is None:
                raise
            write_atomically(self.folder / "manifest.json", previous.read_bytes())
            warnings.warn(
                f"{error}. The run goes on from the checkpoint before it, of round {found.round}", stacklevel=2
            )
            return found

    def _restore(self, manifest: dict[str, Any] | None, run: str, require: Require) -> Restored | None:
        """Read the checkpoint that `manifest`, the contents of `manifest.json`, describes.

        The other arguments, the result and the errors are those of `restore`.
        """
        if manifest is None:
            if len(read_history(self.out / "history.jsonl", torn=True)) > 1:  # a killed first round leaves one row
                raise CheckpointError(
                    f"{self.folder / 'manifest.json'} is missing, although the history has rounds: restore the file, "
                    "or start the run again in another folder"
                )
            return None
        path, number = self.folder / str(manifest["server"]), int(manifest["round"])
        state, facts = read_message(path)
        if facts.get("run") != run or manifest.get("run") != run or facts.get("round") != str(number):
            raise CheckpointError(
                f"{path} belongs to another run or round than this one, so the folder's files are mixed: start the run "
                "again in another folder"
            )
        changes = self._changes(number)
        rows = self._complete_rows(manifest)
        require({int(c): one["memory"] for line in changes for c, one in line["clients"].items() if one["memory"]})
        for old in range(number + 1):  # of a commit that was interrupted
            shutil.rmtree(self.unfinished / str(old), ignore_errors=True)
        self._set_aside_messages(from_round=number + 1)
        if self._records.exists():
            write_atomically(self._records, "".join(json.dumps(line) + "\n" for line in changes).encode())
        history = self.out / "history.jsonl"
        lines = history.read_bytes().splitlines(keepends=True) if history.exists() else []
        write_atomically(history, b"".join(lines[: len(rows)]))
        metadata, clients = dict(manifest.get("transport", {})), [line["clients"] for line in changes]
        return Restored(number, state, metadata, clients, rows)

    def _changes(self, upto: int) -> list[dict[str, Any]]:
        """Read the changed `ClientRecord`s of each round up to round `upto`, in the order of the rounds."""
        path, kept = self._records, []
        self._records_sum = hashlib.sha256()
        for number, text in enumerate(
            files.read_bytes(path, CheckpointError).splitlines(True) if path.exists() else (), 1
        ):
            if not text.endswith(b"\n"):
                break  # a killed process left half a line
            found = files.parse_json(text, path, CheckpointError, number)
            if not isinstance(found, dict) or not {"round", "clients"} <= found.keys():
                raise CheckpointError(f"{path} is damaged: line {number} lacks the keys round and clients")
            if found["round"] > upto:
                break
            self._records_sum.update(text)
            kept.append(found)
        return kept

    def state(self) -> Message:
        """Read and return the server's state after the last completed round.

        Raises:
            CheckpointError: no round was completed, or the file of the state cannot be read.
        """
        manifest = self.manifest()
        if manifest is None:
            raise CheckpointError(f"{self.folder} holds no completed round")
        return read_message(self.folder / str(manifest["server"]))[0]

    def rows(self) -> list[dict[str, Any]]:
        """Read and return the rows of all completed rounds.

        Raises:
            CheckpointError: a line of the history is damaged or missing, or a file was changed after the run wrote it.
        """
        manifest = self.manifest() or {"round": 0}
        self._changes(int(manifest["round"]))
        return self._complete_rows(manifest)

    def _complete_rows(self, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the history up to the last completed round, after checking the run's files by their checksums.

        `manifest` is the contents of the file `manifest.json`, which states which round was completed last.
        """
        path, count = self.out / "history.jsonl", int(manifest["round"])
        rows = read_history(path, torn=True)[:count]
        if len(rows) != count:
            raise CheckpointError(
                f"{path} holds {len(rows)} rounds, but the checkpoint is of round {count}, so lines were lost: start "
                "the run again in another folder"
            )
        lines = path.read_bytes().splitlines(keepends=True)[:count] if path.exists() else []
        self._history_sum = hashlib.sha256(b"".join(lines))
        stated = manifest.get("sums")
        for name, found in self._sums().items() if count else ():
            if not isinstance(stated, dict) or stated.get(name) != found:
                raise CheckpointError(
                    f"{self.out / name} was changed after the run wrote it (its checksum differs): restore the file"
                )
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Append the `row` of a round to `history.jsonl`."""
        self._history_sum.update(self._append(self.out / "history.jsonl", row))

    def _append(self, path: Path, line: Mapping[str, Any]) -> bytes:
        text = (json.dumps(line) + "\n").encode()
        try:
            with path.open("ab") as file:
                file.write(text)
            return text
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error

    def _set_aside_messages(self, from_round: int) -> None:
        """Rename the transcript's folders of interrupted rounds, which are repeated, to N.interrupted-1 and so on."""
        transcript = self.out / "transcript"
        for folder in transcript.glob("[0-9]*") if transcript.exists() else ():
            if folder.name.isdecimal() and int(folder.name) >= from_round:
                count = len(list(transcript.glob(f"{folder.name}.interrupted-*")))
                folder.rename(transcript / f"{folder.name}.interrupted-{count + 1}")

    def record(self, round_number: int, client: int, direction: str, message: Message, verb: str = "local") -> None:
        """Save a message between the server and a client as a file of the transcript.

        Args:
            round_number: index of the round.
            client: index of the client.
            direction: "down" if the server sent the message, or "up" if the client sent it.
            message: the message.
            verb: name of the exchange, such as "local" for training.
        """
        name = direction if verb == "local" else f"{verb}-{direction}"
        path = self.out / "transcript" / str(round_number) / f"{client}-{name}.safetensors"
        write_atomically(path, encode(message, {"client": str(client), "round": str(round_number)}))


def _read_manifest(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found = files.parse_json(files.read_bytes(path, CheckpointError), path, CheckpointError)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this library: give the folder of a run")
    return found
