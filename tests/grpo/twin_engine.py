"""A sampling engine that is a second copy of the model in this process: slow, exact, and like real engines in
that it keeps what it computed until it is told to forget it."""

import hashlib

import torch

from visor.models.base import Request, Sampling
from visor.models.decoding import decode, inference
from visor.models.loading import load_model, load_processor
from visor.models.rendering import Encoded
from visor.models.sampling import Sampler
from visor.models.sampling_engine import EngineReply
from visor.models.tensors import collate
from visor.types import ImageRef


class Forced:
    """Samples the ids it is given."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, logits, step):
        return torch.tensor([self.ids[step]])

    def keep(self, index):
        pass


class TwinEngine:
    def __init__(self, path, *, max_context, max_images, engine_args=None):
        self.model, self.max_context, self.max_images = str(path), max_context, max_images
        self.arguments = engine_args or {}
        self.twin = load_model(path)
        self.renderer = load_processor(path).renderer()
        self.vocab_size = self.twin.lm_head.out_features
        with torch.no_grad():
            for parameter in self.twin.parameters():  # nothing is right before the first push
                parameter.normal_(std=0.02)
        self.features, self.pictures = {}, {}
        self.pushes = self.resets = self.closed = 0

    async def generate(self, prompt, params):
        banned = torch.zeros(self.vocab_size, dtype=torch.bool)
        banned[list(params.banned_ids)] = True
        sampling = Sampling(params.temperature, params.top_p, params.max_tokens)
        sampler = Sampler([Request([], params.seed, sampling)], banned)
        encoded, reply = self._decode(prompt, sampler, params.max_tokens, set(params.stop_ids))
        reason = "stop" if reply.stopped else "length"
        return EngineReply(reply.token_ids, reply.logprobs, reason, encoded.input_ids)

    def score(self, prompt, reply_ids):
        return self._decode(prompt, Forced(reply_ids), len(reply_ids), set())[1].logprobs

    def load_weights(self, weights):
        self.pushes += 1
        given = dict(weights)
        missing, unknown = self.twin.load_state_dict(given, strict=False)
        assert not unknown
        assert set(missing) <= {"lm_head.weight"}

    def reset_caches(self):
        self.resets += 1
        self.features.clear()

    def close(self):
        self.closed += 1

    def _decode(self, prompt, sampler, limit, stop_ids):
        encoded = self._encoded(prompt)
        features = [self._features(ref) for ref in encoded.images]
        with inference(self.twin):
            batch = collate([encoded], self.renderer, self._picture, padding="left", pixels=False)
            (reply,) = decode(self.twin, batch, features, [0], [limit], sampler, stop_ids)
        return encoded, reply

    def _encoded(self, prompt):
        encoded, images = Encoded(), iter(prompt.images)
        for token in prompt.token_ids:
            if token != self.renderer.image_token_id:
                encoded.input_ids.append(token)
                continue
            image = next(images)
            key = hashlib.sha256(image.tobytes()).hexdigest()
            ref = ImageRef(page_id=key, min_pixels=784, max_pixels=image.width * image.height)
            self.pictures[key] = image
            grid = self.renderer.grid(ref, self._picture)
            start, pads = len(encoded.input_ids), grid[1] * grid[2] // 4
            encoded.input_ids += [token] * pads
            encoded.images.append(ref)
            encoded.image_sizes.append(image.size)
            encoded.grids.append(grid)
            encoded.image_spans.append((start, start + pads))
        return encoded

    def _picture(self, ref):
        return self.pictures[ref.page_id]

    def _features(self, ref):
        if ref.page_id not in self.features:
            pixels = torch.from_numpy(self.renderer.pixels(ref, self._picture))
            grid = torch.tensor([self.renderer.grid(ref, self._picture)])
            with inference(self.twin):
                made = self.twin.model.get_image_features(pixels, grid).pooler_output
            self.features[ref.page_id] = made[0]
        return self.features[ref.page_id]
