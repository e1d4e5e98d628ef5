"""The loop over time as machine code, made for each shape by LLVM."""
