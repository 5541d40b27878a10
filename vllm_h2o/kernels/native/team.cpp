#include "team.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace h2o {

Runtime& runtime() {
  static Runtime functions = {};
  return functions;
}

}  // namespace h2o

extern "C" {

// Which structs this was built with: LAYOUT in native.py.
int h2o_layout() { return 3; }

void h2o_use_runtime(const h2o::Runtime* functions) { h2o::runtime() = *functions; }

// Asks the system for what the kernels need of it; 0 when that is refused.
int h2o_prepare() {
#if defined(__AMX_BF16__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 1;
#endif
}
}
