-- Apply one batch of events to a worker's set of chunks and append it to the stream, or refuse and change nothing.
-- KEYS: worker, chunks, events
-- ARGV: epoch, seq, payload (see wire.py), longest stream, grace in ms, then the payload's events once more as pairs
-- (kind, hashes end to end): not every server's cmsgpack reads the payload's byte strings.
-- Returns 'ok', 'gone' (no registration) or 'fenced' (another life, or seq is not the next one).
local HASH_BYTES = 16
local ARGUMENTS_PER_CALL = 512
local life = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if not life[1] then
  return 'gone'
end
if life[1] ~= ARGV[1] or (tonumber(life[2]) or -1) + 1 ~= tonumber(ARGV[2]) then
  return 'fenced'
end

local function change(command, packed)
  local batch = {}
  for at = 1, #packed, HASH_BYTES do
    batch[#batch + 1] = string.sub(packed, at, at + HASH_BYTES - 1)
    if #batch == ARGUMENTS_PER_CALL then
      redis.call(command, KEYS[2], unpack(batch))
      batch = {}
    end
  end
  if #batch > 0 then
    redis.call(command, KEYS[2], unpack(batch))
  end
end

for at = 6, #ARGV, 2 do
  local kind, packed = ARGV[at], ARGV[at + 1]
  if kind == 'stored' then
    change('SADD', packed)
  elseif kind == 'removed' then
    change('SREM', packed)
  else
    redis.call('UNLINK', KEYS[2])
  end
end
redis.call('HSET', KEYS[1], 'seq', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'entry', ARGV[3])
return 'ok'
