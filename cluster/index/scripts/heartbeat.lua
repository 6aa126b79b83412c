-- Say that a life goes on, and keep its registration and chunks from expiring.
-- KEYS: worker, chunks, beat        ARGV: epoch, payload, heartbeat TTL in ms, grace in ms, last seq acknowledged to it
-- Returns 'ok', 'gone' (no registration) or 'fenced' (another life, or this server never saw what was acknowledged:
-- it took over from one that was ahead).
local life = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if not life[1] then
  return 'gone'
end
if life[1] ~= ARGV[1] or (tonumber(life[2]) or -1) < tonumber(ARGV[5]) then
  return 'fenced'
end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 'ok'
