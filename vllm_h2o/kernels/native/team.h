// SPDX-License-Identifier: Apache-2.0
// The threads that the kernels run on: those of the OpenMP runtime that the process already has.
//
// A runtime of our own would be a second set of threads that nothing binds to processors. So
// whoever loads this library hands over the functions of the runtime that torch uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "layout.h"

namespace h2o {

H2oRuntime& runtime();

// One thread of a team, as the body that it runs sees it.
struct Team {
  int thread;
  int size;

  void barrier() const {
    if (size > 1) runtime().barrier();
  }
};

inline int max_threads() { return runtime().parallel ? runtime().max_threads() : 1; }

// Runs body(team) on up to `num_threads` threads.
template <class F>
void parallel(int num_threads, F& body) {
  if (num_threads <= 1 || !runtime().parallel) {
    body(Team{0, 1});
    return;
  }
  const auto call = [](void* data) {
    (*static_cast<F*>(data))(Team{runtime().thread(), runtime().num_threads()});
  };
  runtime().parallel(call, &body, static_cast<unsigned>(num_threads), 0);
}

// Memory that is kept from call to call and only ever grows; aligned to cache lines.
class Scratch {
 public:
  template <class T>
  T* get(size_t count) {
    const size_t needed = count * sizeof(T) + kLine;
    if (needed > size_) {
      bytes_.reset(new char[needed]);
      size_ = needed;
    }
    const auto address = reinterpret_cast<uintptr_t>(bytes_.get());
    return reinterpret_cast<T*>((address + kLine - 1) / kLine * kLine);
  }

 private:
  static constexpr size_t kLine = 64;
  std::unique_ptr<char[]> bytes_;
  size_t size_ = 0;
};

}  // namespace h2o
