-- When the job was last lost more than once in a row; a person who takes it back does not count.
-- Null: never.
alter table job_bodies add column lost_again_at timestamptz;
