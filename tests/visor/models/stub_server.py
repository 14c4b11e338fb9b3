"""`visor vllm-serve` with an engine of a few lines in vLLM's place: what the HTTP layer does, in a second."""

import asyncio
import hashlib
import sys

from visor.cli import main
from visor.models import vllm_engine
from visor.models.loading import load_config
from visor.models.sampling_engine import EngineBusy, EngineFailed, EngineReply
from visor.models.weight_files import check_shapes, expected_weights


class StubEngine:
    """A reply is a digest of the prompt with its pixels, the parameters and the weights."""

    max_context, max_images, vocab_size = 500, 3, 700

    def __init__(self, path, **settings):
        self.model, self.settings = path, settings
        self.expected = expected_weights(load_config(path))
        self.weights, self.busy, self.resets = b"", False, 0

    async def generate(self, prompt, params):
        if params.seed == 13:
            raise EngineFailed(f"the vLLM engine of {self.model} died: bad luck")
        if params.seed == 14:
            raise ValueError("this prompt is refused")
        if params.seed == 15:
            self.busy = True
            try:
                await asyncio.sleep(60)
            finally:
                self.busy = False
        said = [prompt.token_ids, [image.tobytes() for image in prompt.images], params, self.weights]
        digest = hashlib.sha256(repr(said).encode()).digest()
        return EngineReply(list(digest), [-byte / 7 for byte in digest], "stop", list(prompt.token_ids))

    def load_weights(self, weights):
        if self.busy:
            raise EngineBusy("1 requests run")
        check_shapes(weights.shapes(), self.expected)
        self.weights = hashlib.sha256(repr([(n, w.tolist()) for n, w in weights]).encode()).digest()

    def reset_caches(self):
        self.resets += 1

    def score(self, prompt, reply_ids):
        return [-float(i) - self.resets for i in reply_ids]

    def close(self):
        pass


if __name__ == "__main__":
    vllm_engine.LocalEngine = StubEngine
    sys.exit(main(["vllm-serve", *sys.argv[1:]]))
