// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace h2o {

H2oRuntime& runtime() {
  static H2oRuntime functions = {};
  return functions;
}

}  // namespace h2o

extern "C" {

void h2o_use_runtime(const H2oRuntime* functions) { h2o::runtime() = *functions; }

// Asks the system for the state that AMX needs; 0 when that is refused.
int h2o_prepare() {
#if defined(__AMX_BF16__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 1;
#endif
}
}
