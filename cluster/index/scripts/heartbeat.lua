-- Say that a life goes on, and keep its registration and chunks from expiring.
-- KEYS: worker, chunks, beat        ARGV: epoch, payload, heartbeat TTL in ms, grace in ms
-- Returns 'ok', 'gone' (no registration) or 'fenced' (another life).
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return 'gone'
end
if epoch ~= ARGV[1] then
  return 'fenced'
end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 'ok'
