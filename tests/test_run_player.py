"""Speech written as it comes: what a player on the other end reads, and what is left when nobody reads."""

import contextlib
import io
import signal
import wave

import numpy as np
import pytest
import soundfile

from voxport.errors import WorkError
from voxport.run.audio import to_pcm16
from voxport.run.player import PipeClosed, Player, open_player, wav_header

CHUNKS = [np.linspace(-1.2, 1.2, n, dtype=np.float32) for n in (100, 7, 1)]
SOUND = np.concatenate(CHUNKS)


def test_a_streamed_file_is_a_whole_wav_at_the_end(tmp_path):
    path = tmp_path / "a.wav"
    with open_player(str(path), 24000, raw=False) as player:
        for chunk in CHUNKS:
            player.play(chunk)
            assert path.stat().st_size == 44 + 2 * player.num_samples  # there for whoever follows the file
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth(), file.getnframes()) == (24000, 1, 2, len(SOUND))
        assert file.readframes(len(SOUND)) == to_pcm16(SOUND).tobytes()


def test_raw_samples_have_no_header(tmp_path):
    with open_player(str(tmp_path / "a.raw"), 24000, raw=True) as player:
        player.play(SOUND)
    assert (tmp_path / "a.raw").read_bytes() == to_pcm16(SOUND).tobytes()


def test_a_stream_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_player(str(tmp_path / "a.wav"), 24000, raw=False) as player:
        player.play(SOUND)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, PipeClosed, OSError])
def test_a_file_that_is_streamed_over_is_back_if_the_stream_fails(end, tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(b"precious")
    with contextlib.nullcontext() if end is None else pytest.raises(end), open_player(str(path), 24000, raw=False) as player:
        player.play(SOUND)
        if end is not None:
            raise end
    assert (path.read_bytes() == b"precious") == (end is not None) and list(tmp_path.iterdir()) == [path]


def test_a_file_that_grows_too_large_is_named(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(WorkError, match="cannot write the stream to .*a.wav: File too large"):
            with open_player(str(tmp_path / "a.wav"), 24000, raw=False) as player:
                player.play(SOUND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(WorkError, match="cannot write"), open_player(str(tmp_path / "no" / "a.wav"), 24000, raw=False):
        pass


class Pipe(io.BytesIO):
    """Takes some bytes, then fails."""

    def __init__(self, room, error):
        super().__init__()
        self.room, self.error = room, error

    def seekable(self):
        return False

    def write(self, content):
        if self.tell() + len(content) > self.room:
            raise self.error
        return super().write(content)


def test_a_pipe_gets_a_header_of_unknown_length_that_players_read():
    pipe = Pipe(10**6, OSError())
    player = Player(pipe, 24000, False, "x.wav")
    player.play(SOUND)
    player.finish()
    content = pipe.getvalue()
    assert content == wav_header(24000) + to_pcm16(SOUND).tobytes()
    sound, rate = soundfile.read(io.BytesIO(content), dtype="int16")
    assert rate == 24000 and sound.tolist() == to_pcm16(SOUND).tolist()


def test_a_closed_pipe_is_told_from_a_full_disk():
    with pytest.raises(PipeClosed):
        Player(Pipe(100, BrokenPipeError()), 24000, False, "x.wav").play(SOUND)
    with pytest.raises(WorkError, match="cannot write the stream to x.wav: No space"):
        Player(Pipe(100, OSError(28, "No space left on device")), 24000, False, "x.wav").play(SOUND)
