-- Begin a new life of a worker: a new epoch, no chunks, seq 0. Whatever it had before ends in the same instant.
-- KEYS: workers, worker, chunks, beat, epoch        ARGV: worker id, info, grace in ms, prefix of worker keys, its last epoch
-- Returns the epoch: the server's clock in microseconds, or one more than the last epoch if the clock went back. The
-- worker says its own last one, because a server that took over may not have heard of it.
local now = redis.call('TIME')
local micros = tonumber(now[1]) * 1000000 + tonumber(now[2])
local last = math.max(tonumber(redis.call('GET', KEYS[5]) or '0') or 0, tonumber(ARGV[5]))
local epoch = string.format('%.0f', math.max(last + 1, micros))
redis.call('SET', KEYS[5], epoch)
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
redis.call('HSET', KEYS[2], 'epoch', epoch, 'seq', '0', 'info', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
-- A worker that died without a word leaves only its id behind once its keys have expired.
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[4] .. id) == 0 then
    redis.call('SREM', KEYS[1], id)
  end
end
return epoch
