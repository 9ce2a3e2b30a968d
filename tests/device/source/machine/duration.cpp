#include "machine/duration.h"

#include <algorithm>
#include <unordered_map>

#include "machine/device.h"

namespace sim {
namespace {

constexpr auto kLongest = std::chrono::seconds(10);  // that a thread is late

std::mutex rates_mutex;
Rates rates;
std::unordered_map<std::string, double> named;
std::atomic<bool> rates_are_set{false};
std::atomic<int64_t> most_lateness{0};  // in ticks

Link* const links = new Link[(kMostDevices + 1) * (kMostDevices + 1)];

void update() {
  const double all[] = {rates.flops_per_second, rates.bytes_per_second, rates.seconds_per_operator,
                        rates.link_bytes_per_second, rates.seconds_per_copy};
  rates_are_set = !named.empty() || std::any_of(std::begin(all), std::end(all), [](double rate) { return rate > 0; });
}

double over(double amount, double rate) { return rate > 0 ? amount / rate : 0; }

template <typename F>
double seconds_of(const std::string& name, F by_rates) {
  if (!rates_are_set) return 0;
  std::lock_guard<std::mutex> lock(rates_mutex);
  auto found = named.find(name);
  return found == named.end() ? by_rates() : found->second;
}

}  // namespace

void set_rates(const Rates& fresh) {
  std::lock_guard<std::mutex> lock(rates_mutex);
  rates = fresh;
  update();
}

void set_seconds(const std::string& name, double seconds) {
  std::lock_guard<std::mutex> lock(rates_mutex);
  if (seconds < 0) {
    named.erase(name);
  } else {
    named[name] = seconds;
  }
  update();
}

bool durations_are_set() { return rates_are_set; }

double operator_seconds(const std::string& name, double flops, double bytes) {
  return seconds_of(name, [&] {
    auto work = std::max(over(flops, rates.flops_per_second), over(bytes, rates.bytes_per_second));
    return rates.seconds_per_operator + work;
  });
}

double copy_seconds(const std::string& name, double bytes) {
  return seconds_of(name, [&] { return rates.seconds_per_copy + over(bytes, rates.link_bytes_per_second); });
}

// The first gap that is long enough: the thread that comes first is not always that of the copy that does.
Clock::time_point Link::taken(Clock::time_point start, Clock::duration duration) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!taken_.empty() && taken_.begin()->second + kLongest < start) taken_.erase(taken_.begin());
  for (const auto& [from, until] : taken_) {
    if (start + duration <= from) break;
    start = std::max(start, until);
  }
  if (duration > Clock::duration::zero()) taken_[start] = start + duration;
  return start;
}

Link* link_between(int from, int to) { return &links[(from + 1) * (kMostDevices + 1) + to + 1]; }

void note_lateness(Clock::duration lateness) {
  auto seen = most_lateness.load();
  while (lateness.count() > seen && !most_lateness.compare_exchange_weak(seen, lateness.count())) {
  }
}

double most_lateness_seconds() { return std::chrono::duration<double>(Clock::duration(most_lateness)).count(); }
void reset_lateness() { most_lateness = 0; }

}  // namespace sim
