"""What a run keeps on disk: atomically written files, and a manifest that names the last completed round."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit._utils import files
from distillkit.locking import locked
from distillkit.study._record_files import read_rows
from distillkit.study.records import RecordError
from fl._codec import decode, encode
from fl.message import Message

__all__ = ["CheckpointError", "OtherSettings", "Restored", "Store", "read_history", "read_message", "write_atomically"]

_FORMAT = "distillkit.run/1"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or does not belong to this run; the file is named."""


class OtherSettings(CheckpointError):
    """A run is not what is asked for: another method, other data, another seed, ..."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Args:
        path: of the file; its folder is made.
        data: the whole new content.

    Raises:
        CheckpointError: the folder is unwritable or the disk is full; the old file is untouched.
    """
    try:
        files.write_atomically(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; what was there is kept") from error


def read_message(path: Path) -> tuple[Message, dict[str, str]]:
    """The message in the file at `path`, and the facts beside it.

    Raises:
        CheckpointError: it is missing, torn or altered.
    """
    try:
        return decode(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a usable checkpoint: {error}") from error


def read_history(path: Path, *, torn: bool = False) -> list[dict[str, Any]]:
    """The rows of a `history.jsonl`, which are rounds 1, 2, 3 and so on.

    Args:
        path: of the file; one that does not exist has no rows.
        torn: whether the last line may be half written; it is left out then.

    Raises:
        CheckpointError: a line is damaged, or the rounds do not count up by one (as when two processes wrote the file).
    """
    try:
        return read_rows(path, torn=torn)
    except RecordError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says.

    Attributes:
        round: the last completed one.
        state: the server's after it.
        metadata: of the transport, see `Transport.metadata`.
        changes: what the server learned of its clients, in the order of the rounds.
        open_row: the round's row of the history, if its clients' tests were still to come.
    """

    round: int
    state: Message
    metadata: dict[str, str]
    changes: list[dict[str, Any]]
    open_row: dict[str, Any] | None = None


class Store:
    """The folder of one run: `config.json`, `history.jsonl`, `checkpoint/`, and `transcript/` when asked for.

    The manifest is replaced last: it alone decides which round is the last completed one.

    Args:
        out: the folder.

    Attributes:
        out: the folder.
        folder: its `checkpoint/`.
        memories: where what clients remember is kept.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / "checkpoint"
        self.memories = self.folder / "clients"
        self._records = self.folder / "clients.jsonl"

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Be the only process that runs this run, for the length of a `with` block.

        Raises:
            distillkit.locking.InUse: another process does, or another call in this one; it is named.
            CheckpointError: the folder cannot be made or written.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.out / ".owner.lock", f"the run in {self.out}"))
            except OSError as error:
                raise CheckpointError(f"cannot write in {self.out}: {error.strerror or error}") from error
            yield

    def key(self) -> bytes:
        """The key of a private run's fingerprints: what `config.json` says of the data tells nothing without it.

        It lies in `checkpoint/`, with the clients' memories, and not among what is passed on; drawn when a run begins.

        Raises:
            CheckpointError: the run in the folder has lost it.
        """
        path = self.folder / "identity.key"
        if not self.exists():
            write_atomically(path, secrets.token_bytes(32))
        try:
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read, so nobody can tell whether this is the same data") from error

    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.out / "config.json").exists() or (self.folder / "manifest.json").exists()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start a new run's records: write `config`, what the run was asked to do, and an empty history."""
        write_atomically(self.out / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        write_atomically(self.out / "history.jsonl", b"")
        self._records.unlink(missing_ok=True)

    def manifest(self) -> dict[str, Any] | None:
        """The last committed manifest, or None if no round was completed."""
        path = self.folder / "manifest.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint of this library: give the folder of a run")
        return found

    def commit(
        self,
        round_number: int,
        run: str,
        state: Message,
        models: Mapping[str, Message],
        metadata: Mapping[str, str] | None = None,
        changes: Mapping[str, Any] | None = None,
        open_row: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a round the last completed one.

        Args:
            round_number: the round.
            run: the run's fingerprint, which `restore` compares.
            state: the server's after the round.
            models: the global models by name.
            metadata: of the transport, see `Transport.metadata`.
            changes: what the server learned in this round of what its clients have.
            open_row: its row, if that is not in the history yet because its clients' tests are still to come.
        """
        server = f"server.{round_number}.safetensors"
        write_atomically(self.folder / server, encode(state, {"run": run, "round": str(round_number)}))
        for name, model in models.items():
            write_atomically(self.folder / f"model{f'-{name}' if name else ''}.safetensors", plain(model))
        if changes:
            self._append(self._records, {"round": round_number, "clients": changes})
        manifest = {
            "format": _FORMAT,
            "round": round_number,
            "run": run,
            "server": server,
            "cohort": dict(metadata or {}),
        }
        self._name({**manifest, **({} if open_row is None else {"open": dict(open_row)})})
        for old in self.folder.glob("server.*.safetensors"):
            if old.name != server:
                old.unlink(missing_ok=True)

    def close(self, row: Mapping[str, Any]) -> None:
        """Add the `row` of the last completed round to the history, which was open."""
        self.append(row)
        self._name({k: v for k, v in (self.manifest() or {}).items() if k != "open"})

    def _name(self, manifest: Mapping[str, Any]) -> None:
        write_atomically(self.folder / "manifest.json", (json.dumps(manifest) + "\n").encode())

    def restore(self, run: str) -> Restored | None:
        """The last completed round of the `run` with this fingerprint, and what was true after it, or None.

        Raises:
            CheckpointError: torn, foreign, or incomplete; the file is named.
        """
        manifest = self.manifest()
        if manifest is None:
            return None
        path, number = self.folder / str(manifest["server"]), int(manifest["round"])
        state, facts = read_message(path)
        if facts.get("run") != run or manifest.get("run") != run or facts.get("round") != str(number):
            raise CheckpointError(
                f"{path} belongs to another run or round than this one, so the folder's files are mixed: begin the run "
                "again in another folder"
            )
        metadata, changes = dict(manifest.get("cohort", {})), self._changes(number)
        return Restored(number, state, metadata, changes, manifest.get("open"))

    def _changes(self, upto: int) -> list[dict[str, Any]]:
        """What `commit` was told of clients in the rounds up to `upto`; what stands behind them is cut off the file."""
        path = self._records
        if not path.exists():
            self._adopt(upto)
        if not path.exists():
            return []
        lines, kept = path.read_bytes().splitlines(), []
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except ValueError as error:
                if number == len(lines):
                    break
                raise CheckpointError(f"{path} is damaged: line {number} cannot be read ({error})") from error
            if not isinstance(found, dict) or not {"round", "clients"} <= found.keys():
                raise CheckpointError(f"{path} is damaged: line {number} is of no round")
            if found["round"] > upto:
                break
            kept.append(found)
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return [line["clients"] for line in kept]

    def _adopt(self, upto: int) -> None:
        """A run of the first format, whose memories' files were named by their rounds alone, gets the records it lacks.

        Which payloads its clients hold is not in them, so these travel once more.
        """
        found: dict[str, int] = {}
        for path in self.memories.glob("*/*.safetensors"):
            if path.stem.isdecimal() and int(path.stem) <= upto:
                found[path.parent.name] = max(int(path.stem), found.get(path.parent.name, 0))
        if found:
            self._append(self._records, {"round": upto, "clients": {k: {"memory": str(r)} for k, r in found.items()}})

    def state(self) -> Message:
        """The server's state after the last completed round, for reading."""
        manifest = self.manifest()
        if manifest is None:
            raise CheckpointError(f"{self.folder} holds no completed round")
        return read_message(self.folder / str(manifest["server"]))[0]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all completed rounds, for reading; an open one lacks its clients' tests.

        Raises:
            CheckpointError: see `read_history`.
        """
        manifest = self.manifest() or {"round": 0}
        last = [manifest["open"]] if "open" in manifest else []
        return read_history(self.out / "history.jsonl", torn=True)[: manifest["round"] - len(last)] + last

    def history(self, upto: int) -> list[dict[str, Any]]:
        """The rows of rounds up to `upto`; a later line, or a torn last one, is cut off the file.

        Raises:
            CheckpointError: see `read_history`; or rounds are missing.
        """
        path = self.out / "history.jsonl"
        rows = read_history(path, torn=True)[:upto]
        if len(rows) != upto:
            raise CheckpointError(
                f"{path} holds {len(rows)} rounds, but the checkpoint is of round {upto}, so lines were lost: begin "
                "the run again in another folder"
            )
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the `row` of a round to the history."""
        self._append(self.out / "history.jsonl", row)

    def _append(self, path: Path, line: Mapping[str, Any]) -> None:
        try:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error

    def record(self, round_number: int, client: int, direction: str, message: Message, verb: str = "local") -> None:
        """Keep a message that the server saw, in the transcript.

        Args:
            round_number: the round.
            client: who got or sent it.
            direction: "down" or "up".
            message: as it travelled.
            verb: of the exchange; one that is not `local` stands in the file's name.
        """
        name = direction if verb == "local" else f"{verb}-{direction}"
        path = self.out / "transcript" / str(round_number) / f"{client}-{name}.safetensors"
        write_atomically(path, encode(message, {"client": str(client), "round": str(round_number)}))


def plain(model: Message) -> bytes:
    """The bytes of a `model` file that any safetensors reader opens: the tensors under their own names."""
    from safetensors.torch import save

    [(_, group)] = model.items()
    assert isinstance(group, dict)
    return save(files.contiguous_cpu(group))
