// Runs the kernel above, cluster by cluster.
#include "together.h"
static const Params* given;
static void body() {
  KERNEL(*given);
  leave();
}
extern "C" const char* run(const Params* p, int clusters, int cluster, int threads, int shared, u32 seed) {
  given = p;
  begin(seed);
  for (int c = 0; c < clusters; c++)
    if (const char* error = run_together(body, c * cluster, cluster, threads, shared)) return error;
  return nullptr;
}
