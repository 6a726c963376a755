"""What both workers share on the model side: config, weights, model, KV pool, block manager, sampler, runner.

:mod:`kvrelay.engine.step.interface` is the door: workers see an ``Engine`` and its ``BlockStore`` and never a tensor.
:mod:`kvrelay.engine.fake.engine` implements the same door without torch, for tests and for load on a machine without a model.
"""
