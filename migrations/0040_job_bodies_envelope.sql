-- What the wire that stored a job keeps of its own beside the payload; opaque to everybody else.
alter table job_bodies add column envelope text;
