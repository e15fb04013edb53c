// RowMap: every query of every head once, in whole blocks.
#include "common/row_map.h"

#include <vector>

#include "check.h"

namespace {

using prefill::RowMap;

void check_map(int heads, int qo_len) {
  const RowMap rows = RowMap::of(heads);
  CHECK(rows.rows() <= RowMap::kBlock && rows.rows() > RowMap::kBlock - heads, heads << " heads");
  const int num_blocks = (qo_len + rows.tokens - 1) / rows.tokens;
  std::vector<int> visits(qo_len * heads);
  for (int row = 0; row < num_blocks * RowMap::kBlock; ++row) {
    if (!rows.exists(row, qo_len)) continue;
    const int token = rows.token(row), head = rows.head(row);
    CHECK(0 <= token && token < qo_len && 0 <= head && head < heads,
          heads << " heads, row " << row << ": token " << token << ", head " << head);
    CHECK_EQ(rows.row(token, head), row, heads << " heads");
    CHECK_EQ(row % RowMap::kBlock, token % rows.tokens * heads + head, heads << " heads");
    ++visits.at(token * heads + head);
  }
  for (int visit : visits) CHECK_EQ(visit, 1, heads << " heads, " << qo_len << " tokens");
  CHECK_EQ(rows.tile_tokens(192), 3 * rows.tokens, heads << " heads");
}

}  // namespace

int main() {
  for (int heads = 1; heads <= RowMap::kBlock; ++heads) {
    for (int qo_len : {1, 2, 63, 64, 65, 200}) check_map(heads, qo_len);
  }
  constexpr int kLast = (1 << 30) - 1;  // by default rows are tokens
  for (int row : {0, 1, 63, 64, 1000, kLast}) {
    CHECK_EQ(RowMap{}.token(row), row, "one head");
    CHECK_EQ(RowMap{}.head(row), 0, "one head");
    CHECK(RowMap{}.exists(row, kLast + 1) && !RowMap{}.exists(row, row), "row " << row);
  }
  return prefill::test::result();
}
