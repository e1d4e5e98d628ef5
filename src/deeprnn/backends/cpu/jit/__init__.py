"""The loop over time as machine code by LLVM: one executor for all shapes, pointwise code for each formula."""
