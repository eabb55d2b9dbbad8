#include "team.h"

#include <initializer_list>
#include <utility>

#include "pool.h"

namespace penstock {
namespace {

// More rows take longer to compute than to fetch.
constexpr int64_t kMostTokens = 16;

// Walks the operations like a team, and finds out whether a member could overwrite what a slower one still reads.
class Walk {
public:
    explicit Walk(const Program& program) : program_(program), own_(program.registers.size()) {
        for (size_t i = 0; i < own_.size(); i++) own_[i] = program.registers[i].area >= 0;
        for (const Operation& operation : program.operations) {
            if (const auto* linear = std::get_if<LinearOperation>(&operation)) own_[size_t(linear->out.in)] = false;
            if (const auto* attend = std::get_if<AttendOperation>(&operation)) own_[size_t(attend->out.in)] = false;
        }
        for (const Operation& operation : program.operations) {
            std::visit([&](const auto& by) { add(by); }, operation);
        }
    }

    bool possible() const { return possible_; }
    Sharing sharing() && { return {std::move(own_)}; }

private:
    void add(const NormOperation& by) { write(by.out, {by.x.in}); }
    void add(const ActivationOperation& by) { write(by.out, {by.x.in}); }
    void add(const GateOperation& by) { write(by.out, {by.x.in, by.gate.in}); }
    void add(const ScaleOperation& by) { write(by.x, {}); }
    void add(const RegroupOperation& by) { write(by.out, {by.x.in}); }

    void add(const LinearOperation& by) {
        read(by.x.in);
        share(by.out.in);
    }

    void add(const AttendOperation& by) {
        possible_ &= by.value_dim == 0 && own_[size_t(by.rotated.in)];
        meet();  // after queries are rotated
        share(by.out.in);
    }

    void add(const AdaptOperation&) {}  // teams do not compute steps with adapters

    template <class Other>
    void add(const Other&) { possible_ = false; }

    // An operation that uses `Run::write`.
    void write(const Columns& out, std::initializer_list<int32_t> reads) {
        if (!own_[size_t(out.in)]) return share(out.in);
        for (const int32_t x : reads) read(x);
    }

    void read(int32_t from) {
        if (!own_[size_t(from)]) read_.push_back(from);
    }

    // A member writes to `to` while others may still read what they have read since the last meeting; then all meet.
    void share(int32_t to) {
        for (const int32_t from : read_) possible_ &= !overlap(from, to);
        meet();
    }

    void meet() { read_.clear(); }

    bool overlap(int32_t a, int32_t b) const {
        const int32_t area = program_.registers[size_t(a)].area;
        return a == b || (area >= 0 && area == program_.registers[size_t(b)].area);
    }

    const Program& program_;
    std::vector<bool> own_;
    std::vector<int32_t> read_;  // shared registers that all members read since they met
    bool possible_ = true;
};

}  // namespace

bool worth_a_team(int64_t tokens, int threads) {
    return threads > 1 && threads <= Team::kMost && tokens <= kMostTokens;
}

std::optional<Sharing> sharing_of(const Program& program) {
    Walk walk(program);
    if (!walk.possible()) return {};
    return std::move(walk).sharing();
}

}  // namespace penstock
