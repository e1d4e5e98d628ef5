// Stacks of their own, and how to go from one to another. swapcontext asks the system twice at every switch, for
// signals that nobody uses: it begins a stack, and jumps do the rest.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

struct Stack {
  ucontext_t start;
  jmp_buf left;
  bool begun = true;   // as the caller's own is
  void begin(void (*body)(), char* memory, size_t size) {
    getcontext(&start);
    start.uc_stack.ss_sp = memory;
    start.uc_stack.ss_size = size;
    start.uc_link = nullptr;
    makecontext(&start, body, 0);
    begun = false;
  }
};
__attribute__((noinline)) static void go(Stack& from, Stack& to) {
  if (_setjmp(from.left)) return;
  if (to.begun) _longjmp(to.left, 1);
  to.begun = true;
  setcontext(&to.start);
}
