// Runs the kernel above, cluster by cluster.
static const Params* given;
static void body() {
  transition(*given);
  machine.now->done = true;
  machine.idle = 0;
  swapcontext(&machine.now->context, &machine.home);
}
extern "C" const char* run(const Params* p, int clusters, int cluster, int threads, int shared, u32 seed) {
  given = p;
  machine.error = nullptr;
  machine.random.seed(seed);
  for (int c = 0; c < clusters; c++) {
    machine.fibres.clear();
    machine.gates.clear();
    machine.bytes.clear();
    posted.clear();
    under_way.clear();
    leaving_copies.clear();
    machine.memory.assign(cluster, std::vector<unsigned char>(shared, 0xff));   // NaN everywhere
    machine.warps.assign(cluster * threads / 32, Warp());
    for (int i = 0; i < cluster * threads; i++) {
      auto f = std::make_unique<Fibre>();
      f->rank = i / threads;
      f->thread.x = i % threads;
      f->block.x = c * cluster + f->rank;
      f->warp = i / 32;
      f->lane = i % 32;
      f->stack.resize(1 << 16);
      getcontext(&f->context);
      f->context.uc_stack.ss_sp = f->stack.data();
      f->context.uc_stack.ss_size = f->stack.size();
      f->context.uc_link = &machine.home;
      makecontext(&f->context, body, 0);
      machine.fibres.push_back(std::move(f));
    }
    std::vector<Fibre*> left;
    for (auto& f : machine.fibres) left.push_back(f.get());
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
    if (!under_way.empty() || !leaving_copies.empty()) return "a copy was still under way at the end";
  }
  return nullptr;
}
