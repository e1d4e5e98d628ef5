// Blocks whose threads run as fibres, side by side: for run.h and blocks.h, after the kernel.
#pragma once

static void leave() {   // the end of a fibre's work
  machine.now->done = true;
  machine.idle = 0;
  go(machine.now->stack, machine.home);
}
static void begin(u32 seed) {
  machine.error = nullptr;
  machine.random.seed(seed);
}
// `blocks` blocks from number `first` on, all at once; `body` calls the kernel and `leave`. An error, or null.
static const char* run_together(void (*body)(), int first, int blocks, int threads, int shared) {
  machine.fibres.clear();
  machine.gates.clear();
  machine.bytes.clear();
  posted.clear();
  under_way.clear();
  leaving_copies.clear();
  machine.memory.assign(blocks, std::vector<unsigned char>(shared, 0xff));   // NaN everywhere
  machine.warps.assign(blocks * threads / 32, Warp());
  std::vector<Fibre*> left;
  for (int i = 0; i < blocks * threads; i++) {
    auto f = std::make_unique<Fibre>();
    f->rank = i / threads;
    f->thread.x = i % threads;
    f->block.x = first + f->rank;
    f->warp = i / 32;
    f->lane = i % 32;
    f->memory.reset(new char[1 << 16]);   // as it comes: to clear it would take longer than many a kernel
    f->stack.begin(body, f->memory.get(), 1 << 16);
    left.push_back(f.get());
    machine.fibres.push_back(std::move(f));
  }
  int held = -1, rounds = 0;   // now and then a warp is held back while the others go as far as they can
  while (!left.empty()) {
    if (--rounds <= 0) held = machine.random() % 2 ? (int)(machine.random() % machine.warps.size()) : -1, rounds = machine.random() % 200;
    size_t start = machine.random() % left.size(), count = 1 + machine.random() % left.size();
    for (size_t i = 0; i < count; i++) {   // some fibres get ahead of the others
      Fibre* f = left[(start + i) % left.size()];
      if (f->done || f->warp == held) continue;
      machine.now = f;
      go(machine.home, f->stack);
      if (machine.error) return machine.error;
    }
    std::vector<Fibre*> rest;
    for (Fibre* f : left)
      if (!f->done) rest.push_back(f);
    left = rest;
  }
  return under_way.empty() && leaving_copies.empty() ? nullptr : "a copy was still under way at the end";
}
