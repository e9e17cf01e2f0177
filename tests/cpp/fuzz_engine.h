// Engines that have run for a while, and what becomes of what they publish on its way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fuzz_target.h"
#include "sfs/block_keys.h"
#include "sfs/engine_loop.h"
#include "sfs/kv_journal.h"

constexpr double some_unix_time_s = 1.8e9;

// Requests come at random, some prompts begin alike, blocks are scarce: there are preemptions.
struct RandomEngine {
  RandomEngine(Dice& dice, bool prefix_caching) : config(random_config(dice, prefix_caching)) {
    loop = sfs::EngineLoop(config, batch_time);
  }

  // So many passes that schedule something; ends right after the last of them.
  void run(Dice& dice, int passes) {
    while (passes > 0) {
      if (pass_.waits) {
        now_s = std::max(now_s, loop.oldest().end_s);
        tokens_.clear();
        loop.complete_oldest(tokens_);
      }
      if (!pass_.executed && loop.scheduler.has_requests()) now_s += sfs::idle_sleep_s;
      if (!loop.busy()) now_s = std::max(now_s, next_arrival_s_);
      for (; next_arrival_s_ <= now_s; next_arrival_s_ += dice.real(0.0, 0.01)) add_request(dice);
      pass_ = loop.schedule(now_s);
      passes -= pass_.scheduled;
    }
  }

  // Token ids; some prompts begin alike.
  static std::vector<std::int32_t> random_prompt(Dice& dice, std::uint64_t id, int prompt_tokens) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(prompt_tokens),
                                     static_cast<std::int32_t>(1000 + id));
    std::fill_n(tokens.begin(), dice.from(0, prompt_tokens), dice.from(1, 3));
    return tokens;
  }

  sfs::SchedulerConfig config;
  sfs::BatchTime batch_time{2e-3, 1e-5, 3e-8, 1e-9};
  sfs::EngineLoop loop;
  double now_s = some_unix_time_s;

 private:
  static sfs::SchedulerConfig random_config(Dice& dice, bool prefix_caching) {
    sfs::SchedulerConfig config;
    config.block_size = dice.coin() ? 16 : 4;
    config.max_num_batched_tokens = dice.from(16, 400);
    config.max_num_seqs = dice.from(1, 24);
    config.max_model_len = 512;
    config.num_blocks = dice.from(512 / config.block_size + 2, 3 * 512 / config.block_size);
    config.policy = dice.coin() ? sfs::Policy::fcfs : sfs::Policy::priority;
    config.async_scheduling = dice.coin();
    config.enable_chunked_prefill = dice.from(0, 3) > 0;
    config.enable_prefix_caching = prefix_caching;
    config.long_prefill_token_threshold = dice.from(0, 2) == 0 ? dice.from(8, 64) : 0;
    config.watermark = dice.from(0, 2) == 0 ? 0.05 : 0.0;
    if (!config.enable_chunked_prefill) config.max_num_batched_tokens = 512;
    return config;
  }

  void add_request(Dice& dice) {
    sfs::Request request;
    request.id = ++last_id_;
    request.rank = static_cast<std::uint32_t>(request.id);
    request.arrival_s = next_arrival_s_;
    request.prompt_tokens = dice.from(1, 200);
    request.output_tokens = dice.from(1, 80);
    request.max_tokens = request.output_tokens + (dice.coin() ? 0 : dice.from(1, 40));
    request.priority = dice.from(0, 3);
    if (dice.from(0, 4) > 0)
      request.predicted_output_tokens = static_cast<float>(request.output_tokens);
    const auto prompt = random_prompt(dice, request.id, request.prompt_tokens);
    loop.scheduler.add(request, sfs::block_keys(prompt, config.block_size));
  }

  double next_arrival_s_ = some_unix_time_s;
  std::uint64_t last_id_ = 0;
  sfs::EngineLoop::Pass pass_;
  std::vector<sfs::Token> tokens_;
};

inline void mutate_journal(std::vector<sfs::KvEvent>& journal, Dice& dice) {
  if (journal.empty()) return;
  const auto at = static_cast<std::size_t>(dice.bits() % journal.size());
  const auto other = static_cast<std::size_t>(dice.bits() % journal.size());
  switch (dice.from(0, 7)) {
    case 0:
      journal[at].kind = static_cast<sfs::KvEventKind>(dice.from(0, sfs::kv_event_kinds));
      break;
    case 1:
      journal[at].block = hostile(journal[at].block, dice);
      break;
    case 2:
      journal[at].value = hostile(journal[at].value, dice);
      break;
    case 3:
      journal[at].value = journal[other].value;
      break;
    case 4:
      journal[at].block = journal[other].block;
      break;
    case 5:
      std::swap(journal[at], journal[other]);
      break;
    case 6:
      journal.erase(journal.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    default:
      journal.insert(journal.begin() + static_cast<std::ptrdiff_t>(at), journal[other]);
  }
}
