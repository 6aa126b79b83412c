-- Remove a life, unless a newer one has taken its place.
-- KEYS: workers, worker, chunks, beat       ARGV: worker id, epoch
-- Returns 'ok', 'gone' (no registration) or 'fenced' (another life).
local epoch = redis.call('HGET', KEYS[2], 'epoch')
if not epoch then
  return 'gone'
end
if epoch ~= ARGV[2] then
  return 'fenced'
end
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
redis.call('SREM', KEYS[1], ARGV[1])
return 'ok'
