"""The Attention tab of TensorBoard.

`loader` is what TensorBoard imports; everything else is imported by it, late, so that no fault here can stop the
`tensorboard` command.
"""
