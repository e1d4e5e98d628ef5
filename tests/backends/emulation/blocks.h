// Runs a kernel block by block; KERNEL and JOB are defined by whoever includes this.
#include "together.h"
static const JOB* given_job;
static void job_body() {
  KERNEL(*given_job);
  leave();
}
extern "C" const char* run(const JOB* job, int grid, int rows, int threads, int shared, u32 seed) {
  given_job = job;
  gridDim = {(u32)grid, (u32)rows};
  begin(seed);
  for (int b = 0; b < grid * rows; b++) {
    block_row = b / grid;
    if (const char* error = run_together(job_body, b % grid, 1, threads, shared + 16)) return error;
  }
  return nullptr;
}
