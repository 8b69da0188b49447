#!/usr/bin/env python3
"""Answer jobs until standard input ends, so that many of them pay once for starting Python and importing mlx-lm.

Each line of standard input is a job, a JSON object {"job": KIND, "out": PATH, "spec": {...}}, and is answered by one
line of standard output: {} when `out` is written, {"error": TRACEBACK} when the job failed. A failed job does not end
the worker. KIND is a key of JOBS; what else a job may hold are the parameters of its function.
"""

import json
import os
import sys
import traceback

import mlx.core as mx

from batch import make_batch
from cast import cast_checkpoint
from details import cache_details, rope_details, sampler_details
from embedding import embedding_details
from make_fixture import make_fixture
from reference import make_reference

JOBS = {
    "fixture": make_fixture,
    "cast": cast_checkpoint,
    "reference": make_reference,
    "embedding": embedding_details,
    "batch": make_batch,
    "rope": rope_details,
    "sampler": sampler_details,
    "cache": cache_details,
}


def main():
    # Replies alone go to standard output; whatever a library prints goes to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            job = json.loads(line)
            JOBS[job.pop("job")](**job)
            reply = {}
        except BaseException:  # SystemExit too: the worker must outlive every job
            reply = {"error": traceback.format_exc()}
        mx.clear_cache()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
