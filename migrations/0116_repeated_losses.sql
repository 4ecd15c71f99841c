-- Time of the last loss of the job that was not the first in a row; a take back does not count. Null:
-- there was none. It stays when the job succeeds, since successes do not write this table.
alter table job_bodies add column lost_again_at timestamptz;
