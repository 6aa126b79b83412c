-- Read a worker's epoch and seq, and the next page of its chunks. The hashes come back end to end in one string,
-- because a client unpacks one long string far faster than thousands of short ones. A page at a time, because one
-- answer with a million chunks would keep the server from everybody else.
-- KEYS: worker, chunks      ARGV: cursor of SSCAN, how many chunks to look at
-- Returns {epoch, seq, next cursor, hashes, how many members were no hashes}, or nothing when not registered.
local HASH_BYTES = 16
local life = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if not life[1] then
  return false
end
local page = redis.call('SSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
local hashes, bad = {}, 0
for _, member in ipairs(page[2]) do
  if #member == HASH_BYTES then
    hashes[#hashes + 1] = member
  else
    bad = bad + 1
  end
end
return { life[1], life[2], page[1], table.concat(hashes), bad }
