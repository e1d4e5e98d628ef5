// Runs a kernel block by block, threads as fibres; KERNEL and JOB are defined by whoever includes this.
static const JOB* given_job;
static void job_body() {
  KERNEL(*given_job);
  machine.now->done = true;
  machine.idle = 0;
  swapcontext(&machine.now->context, &machine.home);
}
extern "C" const char* run(const JOB* job, int grid, int rows, int threads, int shared, u32 seed) {
  given_job = job;
  gridDim = {(u32)grid, (u32)rows};
  machine.error = nullptr;
  machine.random.seed(seed);
  for (int b = 0; b < grid * rows; b++) {
    machine.fibres.clear();
    machine.gates.clear();
    marks.clear();
    machine.memory.assign(1, std::vector<unsigned char>(shared + 16, 0xff));   // NaN everywhere
    machine.warps.assign(threads / 32, Warp());
    block_row = b / grid;
    std::vector<Fibre*> left;
    for (int i = 0; i < threads; i++) {
      auto f = std::make_unique<Fibre>();
      f->rank = 0;
      f->thread.x = i;
      f->block.x = b % grid;
      f->warp = i / 32;
      f->lane = i % 32;
      f->stack.resize(1 << 16);
      getcontext(&f->context);
      f->context.uc_stack.ss_sp = f->stack.data();
      f->context.uc_stack.ss_size = f->stack.size();
      f->context.uc_link = &machine.home;
      makecontext(&f->context, job_body, 0);
      machine.fibres.push_back(std::move(f));
      left.push_back(machine.fibres.back().get());
    }
    while (!left.empty()) {
      size_t start = machine.random() % left.size(), count = 1 + machine.random() % left.size();
      for (size_t i = 0; i < count; i++) {   // some fibres get ahead of the others
        Fibre* f = left[(start + i) % left.size()];
        if (f->done) continue;
        machine.now = f;
        swapcontext(&machine.home, &f->context);
        if (machine.error) return machine.error;
      }
      std::vector<Fibre*> rest;
      for (Fibre* f : left)
        if (!f->done) rest.push_back(f);
      left = rest;
    }
  }
  return nullptr;
}
