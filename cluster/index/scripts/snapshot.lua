-- Read a worker's epoch, seq and chunks in one instant. The hashes come back end to end in one string, because a
-- client unpacks one long string far faster than a hundred thousand short ones.
-- KEYS: worker, chunks      Returns {epoch, seq, hashes}, or nothing when the worker is not registered.
local life = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if not life[1] then
  return false
end
return { life[1], life[2], table.concat(redis.call('SMEMBERS', KEYS[2])) }
