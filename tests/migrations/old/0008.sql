BEGIN TRANSACTION;
CREATE TABLE audit (
	id INTEGER NOT NULL, 
	happened_at DATETIME NOT NULL, 
	actor TEXT NOT NULL, 
	token_id INTEGER, 
	action TEXT NOT NULL, 
	target TEXT NOT NULL, 
	detail JSON, 
	request_id TEXT, 
	CONSTRAINT pk_audit PRIMARY KEY (id), 
	CONSTRAINT fk_audit_token_id_token FOREIGN KEY(token_id) REFERENCES token (id)
);
INSERT INTO "audit" VALUES(1,'2026-11-29 22:31:00.000000','command line, user root',NULL,'token.create','token 0123456789ab','{"name": "nightly-h200"}',NULL);
INSERT INTO "audit" VALUES(2,'2026-11-29 22:31:00.000000','nightly-h200 (0123456789ab)',1,'results.post','measurements 3 to 3','{"stored": 1}','a1b2c3');
CREATE TABLE build (
	id INTEGER NOT NULL, 
	digest TEXT NOT NULL, 
	kernel_hash TEXT NOT NULL, 
	space_hash TEXT NOT NULL, 
	protocol TEXT NOT NULL, 
	triton TEXT NOT NULL, 
	ptxas TEXT NOT NULL, 
	torch TEXT NOT NULL, 
	cuda TEXT NOT NULL, 
	driver TEXT NOT NULL, 
	first_seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_build PRIMARY KEY (id), 
	CONSTRAINT uq_build_digest UNIQUE (digest)
);
INSERT INTO "build" VALUES(1,'5547ae2e13285d6f','4f1d2c3b5a697887','a0b1c2d3e4f50617','1','3.6.0','12.9.86','2.13.0','13.0','580.95','2026-11-29 22:31:00.000000');
CREATE TABLE champion_check (
	id INTEGER NOT NULL, 
	night_id INTEGER NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	build_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	config_hash TEXT NOT NULL, 
	against_hash TEXT, 
	outcome TEXT NOT NULL, 
	measured_us DOUBLE, 
	against_us DOUBLE, 
	expected_us DOUBLE, 
	machine_ratio DOUBLE, 
	verdict TEXT NOT NULL, 
	checked_at DATETIME NOT NULL, 
	CONSTRAINT pk_champion_check PRIMARY KEY (id), 
	CONSTRAINT ck_champion_check_verdict CHECK (verdict IN ('ok', 'slower', 'failed', 'unjudged')), 
	CONSTRAINT fk_champion_check_build_id_build FOREIGN KEY(build_id) REFERENCES build (id), 
	CONSTRAINT fk_champion_check_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id), 
	CONSTRAINT fk_champion_check_night_id_night FOREIGN KEY(night_id) REFERENCES night (id), 
	CONSTRAINT fk_champion_check_problem_id_problem FOREIGN KEY(problem_id) REFERENCES problem (id)
);
INSERT INTO "champion_check" VALUES(1,1,1,1,1,'0123456789abcdef',NULL,'ok',602.5,NULL,602.0,1.0,'ok','2026-11-29 22:31:00.000000');
CREATE TABLE claim (
	id INTEGER NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	build_id INTEGER NOT NULL, 
	"plan" TEXT NOT NULL, 
	state TEXT NOT NULL, 
	owner TEXT, 
	attempts INTEGER NOT NULL, 
	detail TEXT, 
	round_started_at DATETIME NOT NULL, 
	taken_at DATETIME, 
	heartbeat_at DATETIME, 
	lease_ends_at DATETIME, 
	finished_at DATETIME, 
	run_id INTEGER, 
	CONSTRAINT pk_claim PRIMARY KEY (id), 
	CONSTRAINT ck_claim_state CHECK (state IN ('open', 'held', 'done', 'failed')), 
	CONSTRAINT ck_claim_held CHECK (state <> 'held' OR (owner IS NOT NULL AND lease_ends_at IS NOT NULL)), 
	CONSTRAINT ck_claim_attempts CHECK (attempts >= 0), 
	CONSTRAINT fk_claim_build_id_build FOREIGN KEY(build_id) REFERENCES build (id), 
	CONSTRAINT fk_claim_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id), 
	CONSTRAINT fk_claim_problem_id_problem FOREIGN KEY(problem_id) REFERENCES problem (id), 
	CONSTRAINT fk_claim_run_id_run FOREIGN KEY(run_id) REFERENCES run (id), 
	CONSTRAINT uq_claim_key UNIQUE (gpu_id, problem_id, build_id, "plan")
);
INSERT INTO "claim" VALUES(1,1,1,1,'{"kernel":"kda","seed":0,"trials":200}','done','tuning-host 4711 0a1b2c3d',1,NULL,'2026-11-29 22:31:00.000000','2026-11-29 22:31:00.000000','2026-11-29 22:31:00.000000',NULL,'2026-11-29 22:31:00.000000',1);
CREATE TABLE demand (
	id INTEGER NOT NULL, 
	gpu_name TEXT NOT NULL, 
	kernel TEXT NOT NULL, 
	shape_key TEXT NOT NULL, 
	count BIGINT NOT NULL, 
	first_seen_at DATETIME NOT NULL, 
	last_seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_demand PRIMARY KEY (id), 
	CONSTRAINT ck_demand_count CHECK (count > 0), 
	CONSTRAINT uq_demand_gpu_name_kernel_shape_key UNIQUE (gpu_name, kernel, shape_key)
);
INSERT INTO "demand" VALUES(1,'NVIDIA H20','kda','N=1,H=96,T=8192',7,'2026-11-29 22:31:00.000000','2026-11-29 22:31:00.000000');
CREATE TABLE gpu (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	compute_capability TEXT NOT NULL, 
	sm_count INTEGER NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	l2_bytes BIGINT NOT NULL, 
	smem_per_block_bytes BIGINT NOT NULL, 
	registers_per_sm BIGINT NOT NULL, 
	warps_per_sm BIGINT NOT NULL, 
	mig_profile TEXT NOT NULL, 
	first_seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_gpu PRIMARY KEY (id), 
	CONSTRAINT uq_gpu_identity UNIQUE (name, compute_capability, sm_count, mig_profile, memory_bytes)
);
INSERT INTO "gpu" VALUES(1,'NVIDIA H200','9.0',132,151397597184,62914560,232448,65536,64,'','2026-11-29 22:31:00.000000');
CREATE TABLE kdatune_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT kdatune_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "kdatune_alembic_version" VALUES('0008');
CREATE TABLE measurement (
	id INTEGER NOT NULL, 
	run_id INTEGER, 
	kernel TEXT NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	build_id INTEGER NOT NULL, 
	config_json TEXT NOT NULL, 
	config_hash TEXT NOT NULL, 
	outcome TEXT NOT NULL, 
	detail TEXT, 
	median_us DOUBLE, 
	p20_us DOUBLE, 
	p80_us DOUBLE, 
	sample_count INTEGER, 
	o_error_ratio DOUBLE, 
	state_error_ratio DOUBLE, 
	requested_num_warps INTEGER, 
	effective_num_warps INTEGER, 
	registers INTEGER, 
	spills INTEGER, 
	smem_bytes INTEGER, 
	occupancy_pct DOUBLE, 
	sm_clock_mhz DOUBLE, 
	throttle_reasons TEXT, 
	regime TEXT, 
	estimated BOOLEAN NOT NULL, 
	measured_at DATETIME NOT NULL, 
	CONSTRAINT pk_measurement PRIMARY KEY (id), 
	CONSTRAINT ck_measurement_ok_has_time CHECK (outcome <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)), 
	CONSTRAINT ck_measurement_outcome CHECK (outcome IN ('ok', 'compile_error', 'resource', 'launch_error', 'illegal_access', 'timeout', 'abort', 'incorrect', 'nondeterministic')), 
	CONSTRAINT fk_measurement_build_id_build FOREIGN KEY(build_id) REFERENCES build (id), 
	CONSTRAINT fk_measurement_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id), 
	CONSTRAINT fk_measurement_problem_id_problem FOREIGN KEY(problem_id) REFERENCES problem (id), 
	CONSTRAINT fk_measurement_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
);
INSERT INTO "measurement" VALUES(1,1,'kda',1,1,1,'{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":2,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','429bca1c3f5d6f92','ok',NULL,610.25,609.25,611.25,15,0.004,0.003,4,4,96,0,80280,18.75,1980.0,NULL,'L2-cold, CUDA graph',0,'2026-11-29 22:31:00.000000');
INSERT INTO "measurement" VALUES(2,1,'kda',1,1,1,'{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":3,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','8f7af05147ae135a','timeout','no end after 120 s',NULL,NULL,NULL,NULL,NULL,NULL,4,4,96,0,80280,18.75,1980.0,NULL,'L2-cold, CUDA graph',0,'2026-11-29 22:31:00.000000');
INSERT INTO "measurement" VALUES(3,1,'kda',1,1,1,'{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":4,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','ce09822a835705a7','ok',NULL,602.5,601.5,603.5,15,0.004,0.003,4,4,96,0,80280,18.75,1980.0,NULL,'L2-cold, CUDA graph',0,'2026-11-29 22:31:00.000000');
CREATE TABLE night (
	id INTEGER NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	build_id INTEGER NOT NULL, 
	backend TEXT NOT NULL, 
	host TEXT NOT NULL, 
	state TEXT NOT NULL, 
	exit_code INTEGER, 
	budget_seconds DOUBLE NOT NULL, 
	machine_ratio DOUBLE, 
	report JSON NOT NULL, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	CONSTRAINT pk_night PRIMARY KEY (id), 
	CONSTRAINT ck_night_state CHECK (state IN ('running', 'done', 'failed', 'interrupted')), 
	CONSTRAINT fk_night_build_id_build FOREIGN KEY(build_id) REFERENCES build (id), 
	CONSTRAINT fk_night_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id)
);
INSERT INTO "night" VALUES(1,1,1,'gpu','h200-1','done',0,7200.0,1.0,'{"format": 1, "night": 1, "state": "done", "exit_code": 0, "gpu": "NVIDIA H200", "backend": "gpu", "host": "h200-1", "build": {}, "started_at": "2026-11-29T22:31:00Z", "finished_at": "2026-11-29T22:31:00Z", "budget_seconds": 7200.0, "spent_seconds": 60.0, "resumed_nights": [], "swept_runs": [], "reference": {"machine_ratio": 1.0, "reason": null, "points": []}, "plan": [], "findings": [], "error": null}','2026-11-29 22:31:00.000000','2026-11-29 22:31:00.000000');
CREATE TABLE "problem" (
	id INTEGER NOT NULL, 
	kernel TEXT NOT NULL, 
	shape_hash TEXT NOT NULL, 
	shape_key TEXT NOT NULL, 
	n_sequences BIGINT, 
	n_heads BIGINT, 
	n_value_heads BIGINT, 
	n_tokens BIGINT, 
	key_dim BIGINT, 
	value_dim BIGINT, 
	dtype TEXT, 
	varlen BOOLEAN, 
	longest_tokens BIGINT, 
	initial_state BOOLEAN, 
	final_state BOOLEAN, 
	state_v_first BOOLEAN, 
	state_dtype TEXT, 
	bucket_n_sequences BIGINT, 
	bucket_n_tokens BIGINT, 
	shape_json TEXT, 
	CONSTRAINT pk_problem PRIMARY KEY (id), 
	CONSTRAINT uq_problem_kernel_shape_hash UNIQUE (kernel, shape_hash), 
	CONSTRAINT ck_problem_shape_json CHECK ((kernel IN ('k1', 'k2', 'kda')) = (shape_json IS NULL)), 
	CONSTRAINT ck_problem_shape_columns CHECK (shape_json IS NOT NULL OR (n_sequences IS NOT NULL AND n_heads IS NOT NULL AND n_value_heads IS NOT NULL AND n_tokens IS NOT NULL AND key_dim IS NOT NULL AND value_dim IS NOT NULL AND dtype IS NOT NULL AND varlen IS NOT NULL AND initial_state IS NOT NULL AND final_state IS NOT NULL AND state_v_first IS NOT NULL AND state_dtype IS NOT NULL AND bucket_n_sequences IS NOT NULL AND bucket_n_tokens IS NOT NULL))
);
INSERT INTO "problem" VALUES(1,'kda','5fb3b261b7177d5e','N=1,H=96,T=8192',1,96,96,8192,128,128,'bf16',0,NULL,1,1,0,'fp32',1,8192,NULL);
CREATE TABLE profile (
	id INTEGER NOT NULL, 
	measurement_id INTEGER NOT NULL, 
	stage TEXT NOT NULL, 
	issue_active_pct DOUBLE, 
	barrier_stall_per_issue DOUBLE, 
	counters JSON, 
	ncu_version TEXT, 
	unavailable_reason TEXT, 
	profiled_at DATETIME NOT NULL, driver TEXT, report_file TEXT, 
	CONSTRAINT pk_profile PRIMARY KEY (id), 
	CONSTRAINT ck_profile_stage CHECK (stage IN ('k1', 'k2')), 
	CONSTRAINT ck_profile_counters_or_reason CHECK ((counters IS NULL) <> (unavailable_reason IS NULL)), 
	CONSTRAINT ck_profile_unavailable_is_null CHECK (unavailable_reason IS NULL OR (issue_active_pct IS NULL AND barrier_stall_per_issue IS NULL)), 
	CONSTRAINT fk_profile_measurement_id_measurement FOREIGN KEY(measurement_id) REFERENCES measurement (id)
);
INSERT INTO "profile" VALUES(1,3,'k1',41.0,0.7,'{"smsp__issue_active.avg.per_cycle_active": {"value": 0.41, "unit": "inst/cycle"}}','2026.3.1',NULL,'2026-11-29 22:31:00.000000','580.159.04',NULL);
INSERT INTO "profile" VALUES(2,3,'k2',NULL,NULL,NULL,NULL,'ERR_NVGPUCTRPERM','2026-11-29 22:31:00.000000',NULL,NULL);
CREATE TABLE promotion (
	id INTEGER NOT NULL, 
	kernel TEXT NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	measurement_id INTEGER, 
	baseline_measurement_id INTEGER, 
	config_json TEXT, 
	config_hash TEXT, 
	default_us DOUBLE, 
	gain DOUBLE, 
	gain_low DOUBLE, 
	gain_high DOUBLE, 
	decision TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	decided_at DATETIME NOT NULL, nearest_regret DOUBLE, 
	CONSTRAINT pk_promotion PRIMARY KEY (id), 
	CONSTRAINT ck_promotion_decision CHECK (decision IN ('promoted', 'tie', 'rejected', 'rollback')), 
	CONSTRAINT ck_promotion_measured CHECK (measurement_id IS NOT NULL OR decision = 'rollback'), 
	CONSTRAINT ck_promotion_config_of_measurement CHECK ((measurement_id IS NULL) = (config_json IS NULL) AND (measurement_id IS NULL) = (config_hash IS NULL)), 
	CONSTRAINT ck_promotion_generation CHECK (generation > 0), 
	CONSTRAINT fk_promotion_baseline_measurement_id_measurement FOREIGN KEY(baseline_measurement_id) REFERENCES measurement (id), 
	CONSTRAINT fk_promotion_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id), 
	CONSTRAINT fk_promotion_measurement_id_measurement FOREIGN KEY(measurement_id) REFERENCES measurement (id), 
	CONSTRAINT fk_promotion_problem_id_problem FOREIGN KEY(problem_id) REFERENCES problem (id), 
	CONSTRAINT uq_promotion_generation UNIQUE (generation)
);
INSERT INTO "promotion" VALUES(1,'kda',1,1,1,NULL,'{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":2,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','429bca1c3f5d6f92',625.0,1.024,1.02,1.03,'promoted','faster than the default',1,'2026-11-29 22:31:00.000000',NULL);
INSERT INTO "promotion" VALUES(2,'kda',1,1,1,1,'{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":2,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','429bca1c3f5d6f92',625.0,1.001,0.999,1.002,'tie','inside the noise',2,'2026-11-29 22:31:00.000000',NULL);
INSERT INTO "promotion" VALUES(3,'kda',1,1,3,1,'{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":4,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','ce09822a835705a7',625.0,1.013,1.011,1.015,'promoted','faster in a paired run',3,'2026-11-29 22:31:00.000000',1.0625);
CREATE TABLE quarantine (
	id INTEGER NOT NULL, 
	gpu_name TEXT NOT NULL, 
	kernel TEXT NOT NULL, 
	shape_key TEXT NOT NULL, 
	config_hash TEXT NOT NULL, 
	config_json TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	count BIGINT NOT NULL, 
	first_seen_at DATETIME NOT NULL, 
	last_seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_quarantine PRIMARY KEY (id), 
	CONSTRAINT ck_quarantine_count CHECK (count > 0), 
	CONSTRAINT uq_quarantine_gpu_name_kernel_shape_key_config_hash UNIQUE (gpu_name, kernel, shape_key, config_hash)
);
INSERT INTO "quarantine" VALUES(1,'NVIDIA H20','kda','N=1,H=96,T=8192','8f7af05147ae135a','{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":3,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','OutOfResources: shared memory',2,'2026-11-29 22:31:00.000000','2026-11-29 22:31:00.000000');
CREATE TABLE receipt (
	id INTEGER NOT NULL, 
	digest TEXT NOT NULL, 
	measurement_id INTEGER NOT NULL, 
	token_id INTEGER NOT NULL, 
	received_at DATETIME NOT NULL, 
	CONSTRAINT pk_receipt PRIMARY KEY (id), 
	CONSTRAINT fk_receipt_measurement_id_measurement FOREIGN KEY(measurement_id) REFERENCES measurement (id), 
	CONSTRAINT fk_receipt_token_id_token FOREIGN KEY(token_id) REFERENCES token (id), 
	CONSTRAINT uq_receipt_digest UNIQUE (digest)
);
INSERT INTO "receipt" VALUES(1,'00112233445566aa',3,1,'2026-11-29 22:31:00.000000');
CREATE TABLE reference_time (
	id INTEGER NOT NULL, 
	night_id INTEGER NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	build_id INTEGER NOT NULL, 
	backend TEXT NOT NULL, 
	shape_key TEXT NOT NULL, 
	config_hash TEXT NOT NULL, 
	outcome TEXT NOT NULL, 
	detail TEXT, 
	median_us DOUBLE, 
	p20_us DOUBLE, 
	p80_us DOUBLE, 
	sample_count INTEGER, 
	sm_clock_mhz DOUBLE, 
	throttle_reasons TEXT, 
	measured_at DATETIME NOT NULL, 
	CONSTRAINT pk_reference_time PRIMARY KEY (id), 
	CONSTRAINT ck_reference_time_ok_has_time CHECK (outcome <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)), 
	CONSTRAINT fk_reference_time_build_id_build FOREIGN KEY(build_id) REFERENCES build (id), 
	CONSTRAINT fk_reference_time_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id), 
	CONSTRAINT fk_reference_time_night_id_night FOREIGN KEY(night_id) REFERENCES night (id)
);
INSERT INTO "reference_time" VALUES(1,1,1,1,'gpu','N=1,H=96,T=8192','0123456789abcdef','ok',NULL,628.5,627.9,629.0,5,1980.0,NULL,'2026-11-29 22:31:00.000000');
CREATE TABLE regression (
	id INTEGER NOT NULL, 
	kernel TEXT NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	config_json TEXT NOT NULL, 
	config_hash TEXT NOT NULL, 
	before_us DOUBLE NOT NULL, 
	after_us DOUBLE NOT NULL, 
	now_us DOUBLE NOT NULL, 
	change_pct DOUBLE NOT NULL, 
	confidence_pct DOUBLE NOT NULL, 
	last_good_at DATETIME NOT NULL, 
	began_at DATETIME NOT NULL, 
	build_before_id INTEGER NOT NULL, 
	build_after_id INTEGER NOT NULL, 
	measurement_before_id INTEGER NOT NULL, 
	measurement_after_id INTEGER NOT NULL, 
	cause TEXT NOT NULL, 
	is_served BOOLEAN NOT NULL, 
	opened_at DATETIME NOT NULL, 
	seen_at DATETIME NOT NULL, 
	resolved_at DATETIME, 
	resolution TEXT, 
	acknowledged_at DATETIME, 
	acknowledged_by TEXT, 
	note TEXT, 
	CONSTRAINT pk_regression PRIMARY KEY (id), 
	CONSTRAINT ck_regression_slower CHECK (before_us > 0 AND after_us > before_us), 
	CONSTRAINT ck_regression_resolution CHECK ((resolved_at IS NULL) = (resolution IS NULL)), 
	CONSTRAINT ck_regression_acknowledged CHECK ((acknowledged_at IS NULL) = (acknowledged_by IS NULL)), 
	CONSTRAINT fk_regression_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id), 
	CONSTRAINT fk_regression_problem_id_problem FOREIGN KEY(problem_id) REFERENCES problem (id), 
	CONSTRAINT fk_regression_build_before_id_build FOREIGN KEY(build_before_id) REFERENCES build (id), 
	CONSTRAINT fk_regression_build_after_id_build FOREIGN KEY(build_after_id) REFERENCES build (id), 
	CONSTRAINT fk_regression_measurement_before_id_measurement FOREIGN KEY(measurement_before_id) REFERENCES measurement (id), 
	CONSTRAINT fk_regression_measurement_after_id_measurement FOREIGN KEY(measurement_after_id) REFERENCES measurement (id)
);
INSERT INTO "regression" VALUES(1,'kda',1,1,'{"k1":{"chunks_per_program":1,"fast_reciprocal":false,"gate_halves":1,"head_fast":false,"load_policy":"default","maxnreg":96,"num_warps":2,"swizzle_bytes":0,"transposed_dots":false,"variant":"triton"},"k2":{"block_v":64,"consumer_regs":null,"consumers":1,"decay_position":0,"defer_store":false,"load_regs":null,"load_warps":0,"maxnreg":null,"num_warps":4,"segments":1,"stages_in":2,"stages_out":0,"store_regs":null,"store_warps":0,"transposed":false,"variant":"triton"},"precision":"fp16"}','429bca1c3f5d6f92',602.5,633.0,633.0,5.06,99.9,'2026-11-19 02:30:00.000000','2026-11-20 02:30:00.000000',1,1,1,1,'nothing that is recorded changed',1,'2026-11-21 06:00:00.000000','2026-11-21 06:00:00.000000',NULL,NULL,'2026-11-22 09:00:00.000000','a person','known');
CREATE TABLE run (
	id INTEGER NOT NULL, 
	"trigger" TEXT NOT NULL, 
	kernel TEXT NOT NULL, 
	gpu_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	backend TEXT NOT NULL, 
	sampler TEXT NOT NULL, 
	budget_trials INTEGER, 
	budget_seconds DOUBLE, 
	seed BIGINT, 
	optuna_version TEXT, 
	state TEXT NOT NULL, 
	outcome_counts JSON, 
	gpu_seconds DOUBLE, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	CONSTRAINT pk_run PRIMARY KEY (id), 
	CONSTRAINT ck_run_state CHECK (state IN ('running', 'done', 'failed', 'interrupted')), 
	CONSTRAINT fk_run_gpu_id_gpu FOREIGN KEY(gpu_id) REFERENCES gpu (id), 
	CONSTRAINT fk_run_problem_id_problem FOREIGN KEY(problem_id) REFERENCES problem (id)
);
INSERT INTO "run" VALUES(1,'nightly','kda',1,1,'gpu','TPESampler',200,600.0,7,'5.0.0','done','{"ok": 2, "timeout": 1}',131.5,'2026-11-29 22:31:00.000000','2026-11-29 22:31:00.000000');
CREATE TABLE token (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	prefix TEXT NOT NULL, 
	token_hash TEXT NOT NULL, 
	scopes TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	revoked_at DATETIME, 
	CONSTRAINT pk_token PRIMARY KEY (id), 
	CONSTRAINT uq_token_prefix UNIQUE (prefix)
);
INSERT INTO "token" VALUES(1,'nightly-h200','0123456789ab','b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5b4d5','promotions:write results:write','2026-11-29 22:31:00.000000',NULL,NULL);
CREATE INDEX ix_run_gpu_id ON run (gpu_id);
CREATE INDEX ix_run_problem_id ON run (problem_id);
CREATE INDEX ix_run_state ON run (state);
CREATE INDEX ix_measurement_build_id ON measurement (build_id);
CREATE INDEX ix_measurement_gpu_id ON measurement (gpu_id);
CREATE INDEX ix_measurement_outcome ON measurement (outcome);
CREATE INDEX ix_measurement_problem_id ON measurement (problem_id);
CREATE INDEX ix_measurement_resume ON measurement (kernel, gpu_id, problem_id, build_id, config_hash);
CREATE INDEX ix_measurement_run_id ON measurement (run_id);
CREATE INDEX ix_profile_measurement_id ON profile (measurement_id);
CREATE INDEX ix_promotion_decision ON promotion (decision);
CREATE INDEX ix_promotion_gpu_id ON promotion (gpu_id);
CREATE INDEX ix_promotion_measurement_id ON promotion (measurement_id);
CREATE INDEX ix_promotion_problem_id ON promotion (problem_id);
CREATE INDEX ix_promotion_served ON promotion (kernel, gpu_id, problem_id, generation);
CREATE INDEX ix_problem_shape_hash ON problem (shape_hash);
CREATE INDEX ix_night_gpu_id ON night (gpu_id);
CREATE INDEX ix_reference_time_night_id ON reference_time (night_id);
CREATE INDEX ix_reference_time_history ON reference_time (gpu_id, build_id, backend);
CREATE INDEX ix_champion_check_night_id ON champion_check (night_id);
CREATE INDEX ix_champion_check_history ON champion_check (gpu_id, problem_id, build_id, config_hash);
CREATE INDEX ix_regression_measurement_before_id ON regression (measurement_before_id);
CREATE INDEX ix_regression_measurement_after_id ON regression (measurement_after_id);
CREATE INDEX ix_promotion_baseline_measurement_id ON promotion (baseline_measurement_id);
CREATE INDEX ix_receipt_measurement_id ON receipt (measurement_id);
CREATE INDEX ix_regression_key ON regression (kernel, gpu_id, problem_id, config_hash);
COMMIT;
